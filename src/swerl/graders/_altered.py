"""Copies of a test that must fail: the same body with another expected value.

A test that passes has reached every assertion of its outermost level. So a copy in which one of
these expects another value fails, unless what it compares calls everything equal.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence

_LEAVES = frozenset({"skip", "skipTest", "skipIf", "skipUnless", "xfail", "importorskip", "exit"})
"""Calls after which a test may end well before its assertions."""
_LENIENT = frozenset({"approx", "ANY"})
"""Names of what calls other values equal too, and so may leave a copy to pass."""
_LARGE = 1e9
"""From somewhere above it on a float does not change where 1 is added."""


def alter(lines: Sequence[str], test: ast.FunctionDef, name: str, rng: random.Random) -> str | None:
    """Return the test under another name and with another expected value; None where it has none.

    `lines` are those of the file. Decorated tests are left alone: they may be expected to fail.
    """
    values = [] if test.decorator_list else list(_expected_values(test))
    if not values:
        return None
    value = rng.choice(values)
    copy = list(lines[test.lineno - 1 : test.end_lineno])
    row = value.lineno - test.lineno
    raw = copy[row].encode()
    other = repr(_another(value.value, rng)).encode()
    copy[row] = (raw[: value.col_offset] + other + raw[value.end_col_offset :]).decode()
    copy[0] = copy[0].replace(f"def {test.name}", f"def {name}", 1)
    return "\n".join(copy)


def _expected_values(test: ast.FunctionDef) -> Iterator[ast.Constant]:
    """Yield the literals that assertions at the test's outermost level compare something with."""
    for statement in test.body:
        if any(map(_may_leave, ast.walk(statement))):
            return
        for one, other in _compared(statement):
            nodes = list(ast.walk(other))
            if any(map(_is_lenient, nodes)):
                continue
            if not any(isinstance(node, ast.Call | ast.Name) for node in nodes):
                continue
            if literal := _leaf(one):
                yield literal


def _compared(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield both sides of an assertion of equality, either one first."""
    sides: tuple[ast.expr, ast.expr] | None = None
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        compare = statement.test
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
            sides = (compare.left, compare.comparators[0])
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        is_equal = isinstance(call.func, ast.Attribute) and call.func.attr == "assertEqual"
        if is_equal and len(call.args) >= 2:
            sides = (call.args[0], call.args[1])
    if sides:
        yield sides
        yield sides[::-1]


def _leaf(node: ast.expr) -> ast.Constant | None:
    """Return a constant of a literal that decides whether it is equal to another one."""
    if isinstance(node, ast.List | ast.Tuple):
        return next(filter(None, map(_leaf, node.elts)), None)
    if isinstance(node, ast.Dict):
        return next(filter(None, map(_leaf, node.values)), None)
    if not isinstance(node, ast.Constant) or node.lineno != node.end_lineno:
        return None
    if isinstance(node.value, float):
        return node if abs(node.value) < _LARGE else None
    return node if isinstance(node.value, int | str | bytes) else None


def _is_lenient(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in _LENIENT


def _may_leave(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return (node.func.id if isinstance(node.func, ast.Name) else name) in _LEAVES
    return isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Raise)


def _another(value: object, rng: random.Random) -> object:
    """Return a value of the same type that nothing honest calls equal.

    Numbers move by one, since some are equal to others that are farther away: those of a clock.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice((-1, 1))
    letters = "".join(rng.choices("aeioulnrst", k=2))
    return value + letters if isinstance(value, str) else bytes(value) + letters.encode()  # type: ignore[call-overload]
