"""Copies of a test that must fail: the same body with another expected value, else negated.

A test that passes has reached every assertion of its outermost level. So a copy in which one of
these expects another value fails, unless what it compares calls everything equal. Copies of one
test differ in the same place and look alike, so that nothing in them tells which value is right.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from swerl.grading.literals import others

Test: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Edit: TypeAlias = tuple[int, int, int, str]
"""Line of the file, counted from 1, first byte and end of what is replaced, and its new text."""

_LEAVES = frozenset({"skip", "skipTest", "skipIf", "skipUnless", "xfail", "importorskip", "exit"})
"""Calls after which a test may end well before its assertions."""
_LENIENT = frozenset({"approx", "ANY"})
"""Names of what calls other values equal too, and so may leave a copy to pass."""
_DECORATORS = frozenset(
    {"parametrize", "usefixtures", "filterwarnings", "asyncio", "anyio", "trio", "django_db"}
    | {"patch", "object", "dict", "override_settings", "isolate_apps"}
)
"""Decorators that leave a test one that passes; one under others may be expected to fail."""
_EQUALITIES = frozenset(
    {"assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual"}
)
_PAIRS = (
    ("assertTrue", "assertFalse"),
    ("assertIn", "assertNotIn"),
    ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertGreater", "assertLessEqual"),
    ("assertLess", "assertGreaterEqual"),
)
_NEGATED = {
    **dict(_PAIRS),
    **{other: one for one, other in _PAIRS},
    "assertNotEqual": "assertEqual",
}
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_UNUSUAL = ("BufferError", "ReferenceError", "StopAsyncIteration", "UnicodeTranslateError")
_WRONG = '{indent}{value} = "{words}".split()\n{indent}assert "_".join({value}) == "{wrong}"'


def alter(
    lines: Sequence[str], test: Test, names: Sequence[str], rng: random.Random
) -> list[list[str]]:
    """Return the lines of a copy that must fail for each name, fewer where fewer ways are found.

    `lines` are those of the file. None is found for a test whose copies might pass.
    """
    ways: list[list[_Edit]] = []
    for kind in _KINDS:
        if len(ways) < len(names):
            ways += kind(lines, test, len(names) - len(ways), rng)
    return [_copy(lines, test, name, edits) for name, edits in zip(names, ways, strict=False)]


def expects_values(lines: Sequence[str], test: Test) -> bool:
    """Say whether the test compares something with a value that stands in it."""
    return bool(_by_values(lines, test, 1, random.Random(0)))


def top(test: Test) -> int:
    """Return the first line of a test or of its decorators, counted from 1."""
    return min([test.lineno, *(each.lineno for each in test.decorator_list)])


def _copy(lines: Sequence[str], test: Test, name: str, edits: Sequence[_Edit]) -> list[str]:
    first = top(test)
    copy = list(lines[first - 1 : test.end_lineno])
    for line, start, end, text in sorted(edits, reverse=True):
        raw = copy[line - first].encode()
        copy[line - first] = (raw[:start] + text.encode() + raw[end:]).decode()
    head = test.lineno - first
    copy[head] = copy[head].replace(f"def {test.name}", f"def {name}", 1)
    return [each for line in copy for each in line.split("\n")]


def _by_values(lines: Sequence[str], test: Test, num: int, rng: random.Random) -> list[list[_Edit]]:
    """Exchange a value that an assertion at the test's outermost level expects."""
    found = []
    for one, other in _equalities(test):
        if (leaf := _leaf(one)) and any(
            isinstance(n, ast.Call | ast.Name) for n in ast.walk(other)
        ):
            source = lines[leaf.lineno - 1].encode()[leaf.col_offset : leaf.end_col_offset].decode()
            if texts := others(source, leaf.value, num, rng):
                end = leaf.end_col_offset or 0
                found.append([[(leaf.lineno, leaf.col_offset, end, text)] for text in texts])
    most = max(map(len, found), default=0)
    return rng.choice([ways for ways in found if len(ways) == most]) if found else []


def _by_pairs(lines: Sequence[str], test: Test, num: int, rng: random.Random) -> list[list[_Edit]]:
    """Compare with a pair of what is expected, where that is no plain value."""
    sides = [side for side in _equalities(test) if side[0].lineno == side[0].end_lineno]
    plain = [one for one, other in sides if _has_call(other) and not _has_call(one)]
    if not (nodes := plain or [one for one, other in sides if _has_call(other)]):
        return []
    node = rng.choice(nodes)
    return [[(node.lineno, node.col_offset, node.col_offset, "("), (*_end(node), ", None)")]]


def _by_exception(
    lines: Sequence[str], test: Test, num: int, rng: random.Random
) -> list[list[_Edit]]:
    """Expect an exception that nothing raises."""
    places = []
    for statement in _reached(test):
        calls = [item.context_expr for item in getattr(statement, "items", [])]
        for call in [*calls, getattr(statement, "value", None)]:
            if isinstance(call, ast.Call) and _name(call.func) in _RAISES and call.args:
                places.append(call.args[0])
    places = [node for node in places if node.lineno == node.end_lineno]
    if not places:
        return []
    node = rng.choice(places)
    line, end, _ = _end(node)
    unusual = rng.sample(_UNUSUAL, min(num, len(_UNUSUAL)))
    return [[(line, node.col_offset, end, name)] for name in unusual]


def _by_negation(
    lines: Sequence[str], test: Test, num: int, rng: random.Random
) -> list[list[_Edit]]:
    """Turn an assertion at the test's outermost level into its opposite."""
    ways = []
    for statement in _reached(test):
        if isinstance(statement, ast.Assert):
            node = statement.test
            ways.append(
                [(node.lineno, node.col_offset, node.col_offset, "not ("), (*_end(node), ")")]
            )
        elif (call := _called(statement)) and call.attr in _NEGATED:
            line, end, _ = _end(call)
            ways.append([(line, end - len(call.attr), end, _NEGATED[call.attr])])
    return [rng.choice(ways)] if ways else []


def _by_end(lines: Sequence[str], test: Test, num: int, rng: random.Random) -> list[list[_Edit]]:
    """Let the test run to its end and fail there."""
    first = test.body[0]
    if first.lineno == test.lineno or len(list(_reached(test))) < len(test.body):
        return []
    indent = lines[first.lineno - 1].encode()[: first.col_offset].decode()
    known = [*re.findall(r"[a-z]{2,}", test.name), "value", "result"]
    line, end = test.end_lineno or 0, len(lines[(test.end_lineno or 1) - 1].rstrip("\r").encode())
    ways = []
    for _ in range(num):
        one, two = rng.sample(sorted(set(known)), 2)
        text = _WRONG.format(
            indent=indent, value=f"{one}_{two}", words=f"{one} {two}", wrong=f"{two}_{one}"
        )
        ways.append([(line, end, end, f"\n{text}")])
    return ways


_KINDS = (_by_values, _by_pairs, _by_exception, _by_negation, _by_end)


def _end(node: ast.expr) -> tuple[int, int, int]:
    end = node.end_col_offset or 0
    return node.end_lineno or 0, end, end


def _reached(test: Test) -> Iterator[ast.stmt]:
    """Yield the statements of the outermost level that a test which passes has gone through."""
    for decorator in test.decorator_list:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if _name(name) not in _DECORATORS or any(_name(n) in _LEAVES for n in ast.walk(decorator)):
            return
    for statement in test.body:
        if _may_leave(statement):
            return
        yield statement


def _equalities(test: Test) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield both sides of assertions of equality, either one first."""
    for statement in _reached(test):
        if sides := _compared(statement):
            nodes = [node for side in sides for node in ast.walk(side)]
            if not any(_name(node) in _LENIENT for node in nodes):
                yield sides
                yield sides[::-1]


def _compared(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        compare = statement.test
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
            return compare.left, compare.comparators[0]
    elif (called := _called(statement)) and called.attr in _EQUALITIES:
        call = statement.value  # type: ignore[attr-defined]
        if len(call.args) >= 2:
            return call.args[0], call.args[1]
    return None


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def _called(statement: ast.stmt) -> ast.Attribute | None:
    """Return the method that a statement does nothing but call."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return called if isinstance(called, ast.Attribute) else None
    return None


def _leaf(node: ast.expr) -> ast.Constant | None:
    """Return a constant of a literal that decides whether it is equal to another one."""
    if isinstance(node, ast.List | ast.Tuple):
        return next(filter(None, map(_leaf, node.elts)), None)
    if isinstance(node, ast.Dict):
        return next(filter(None, map(_leaf, node.values)), None)
    is_plain = isinstance(node, ast.Constant) and node.lineno == node.end_lineno
    return node if is_plain and isinstance(node, ast.Constant) else None


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _may_leave(statement: ast.stmt) -> bool:
    """Say whether the test may end in this statement; functions inside it have own ends."""
    if isinstance(statement, ast.Return | ast.Raise):
        return True
    for node in _own(statement):
        if isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(node, ast.Call) and _name(node.func) in _LEAVES:
            return True
    return False


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but for the bodies of functions, where only calls count."""
    inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    yield node
    below = (each for each in ast.walk(node) if isinstance(each, ast.Call)) if inner else None
    if below is not None:
        yield from below
        return
    for child in ast.iter_child_nodes(node):
        yield from _own(child)
