"""Copies of a test that must fail: the same body with another expected value, else negated.

A test that passes has reached every assertion of its outermost level. A copy in which one of these
expects another value fails, unless the compared object equals everything. Copies of one test differ
in the same place and look alike, so that no copy reveals the right value.
"""

from __future__ import annotations

import ast
import random
import re
import string
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Test: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Edit: TypeAlias = tuple[int, int, int, str]
"""Line of the file from 1, first and end byte of the replaced text, and the new text."""

_LEAVES = frozenset({"skip", "skipTest", "skipIf", "skipUnless", "xfail", "importorskip", "exit"})
"""Calls that may end a test successfully before its assertions."""
_LENIENT = frozenset({"approx", "ANY"})
"""Names of objects that equal other values too, so that a copy may pass."""
_DECORATORS = frozenset(
    {"parametrize", "usefixtures", "filterwarnings", "asyncio", "anyio", "trio", "django_db"}
    | {"patch", "object", "dict", "override_settings", "isolate_apps"}
)
"""Decorators under which a test must pass; one under others may be expected to fail."""
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
_LARGE = 1e9
"""Somewhat above this a float no longer changes with each of its digits."""
_LETTERS = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
_QUOTED = re.compile(
    r"(?P<start>[a-zA-Z]*(?P<quote>\"\"\"|'''|\"|'))(?P<body>.*)(?P=quote)", re.DOTALL
)
_WRONG = '{indent}{value} = "{words}".split()\n{indent}assert "_".join({value}) == "{wrong}"'


def alter(
    lines: Sequence[str], test: Test, names: Sequence[str], rng: random.Random
) -> list[list[str]]:
    """Return the lines of a failing copy for each name, or for fewer if fewer ways exist.

    `lines` are those of the file. A test whose copies might pass gets none.
    """
    ways: list[list[_Edit]] = []
    # The kinds are tried in order until each name has a copy.
    for kind in _KINDS:
        if len(ways) < len(names):
            ways += kind(lines, test, len(names) - len(ways), rng)
    return [_copy(lines, test, name, edits) for name, edits in zip(names, ways, strict=False)]


def expects_values(lines: Sequence[str], test: Test) -> bool:
    """Return True if the test compares something with a literal."""
    return bool(_by_values(lines, test, 1, random.Random(0)))


def top(test: Test) -> int:
    """Return the first line of a test or of its decorators, counted from 1."""
    return min([test.lineno, *(each.lineno for each in test.decorator_list)])


def _copy(lines: Sequence[str], test: Test, name: str, edits: Sequence[_Edit]) -> list[str]:
    first = top(test)
    copy = list(lines[first - 1 : test.end_lineno])
    # From the end, so that the positions of earlier edits stay valid.
    for line, start, end, text in sorted(edits, reverse=True):
        # `ast` counts columns in bytes.
        raw = copy[line - first].encode()
        copy[line - first] = (raw[:start] + text.encode() + raw[end:]).decode()
    head = test.lineno - first
    copy[head] = copy[head].replace(f"def {test.name}", f"def {name}", 1)
    return [each for line in copy for each in line.split("\n")]


def _by_values(lines: Sequence[str], test: Test, num: int, rng: random.Random) -> list[list[_Edit]]:
    """Change a literal that an assertion of the outermost level expects."""
    found = []
    for one, other in _equalities(test):
        if (leaf := _leaf(one)) and any(
            isinstance(n, ast.Call | ast.Name) for n in ast.walk(other)
        ):
            source = lines[leaf.lineno - 1].encode()[leaf.col_offset : leaf.end_col_offset].decode()
            if texts := other_literals(source, leaf.value, num, rng):
                end = leaf.end_col_offset or 0
                found.append([[(leaf.lineno, leaf.col_offset, end, text)] for text in texts])
    # Only places with the most alternatives, so that as many names as possible get a copy.
    most = max(map(len, found), default=0)
    return rng.choice([ways for ways in found if len(ways) == most]) if found else []


def _by_pairs(lines: Sequence[str], test: Test, num: int, rng: random.Random) -> list[list[_Edit]]:
    """Compare with a pair that holds the expected value, if that is no literal."""
    # An edit replaces text within one line.
    sides = [side for side in _equalities(test) if side[0].lineno == side[0].end_lineno]
    plain = [one for one, other in sides if _has_call(other) and not _has_call(one)]
    if not (nodes := plain or [one for one, other in sides if _has_call(other)]):
        return []
    node = rng.choice(nodes)
    # A value does not equal a pair that contains it.
    return [[(node.lineno, node.col_offset, node.col_offset, "("), (*_end(node), ", None)")]]


def _by_exception(
    lines: Sequence[str], test: Test, num: int, rng: random.Random
) -> list[list[_Edit]]:
    """Expect an exception that no code raises."""
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
    """Negate an assertion of the outermost level."""
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
    """Append an assertion that fails."""
    first = test.body[0]
    # The body must begin on a line of its own, and the test must reach its end.
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
    """Yield the outermost statements that a passing test has surely run."""
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
    """Return the method if the statement is a method call alone."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return called if isinstance(called, ast.Attribute) else None
    return None


def _leaf(node: ast.expr) -> ast.Constant | None:
    """Return a constant inside a literal, on which its equality depends."""
    if isinstance(node, ast.List | ast.Tuple):
        return next(filter(None, map(_leaf, node.elts)), None)
    if isinstance(node, ast.Dict):
        return next(filter(None, map(_leaf, node.values)), None)
    is_plain = isinstance(node, ast.Constant) and node.lineno == node.end_lineno
    return node if is_plain and isinstance(node, ast.Constant) else None


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _may_leave(statement: ast.stmt) -> bool:
    """Return True if the test may end in this statement, nested functions aside."""
    if isinstance(statement, ast.Return | ast.Raise):
        return True
    for node in _own(statement):
        if isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(node, ast.Call) and _name(node.func) in _LEAVES:
            return True
    return False


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it; of nested functions only the calls."""
    inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    yield node
    if inner:
        yield from (each for each in ast.walk(node) if isinstance(each, ast.Call))
        return
    for child in ast.iter_child_nodes(node):
        yield from _own(child)


def other_literals(source: str, value: object, num: int, rng: random.Random) -> list[str]:
    """Return up to `num` literals of distinct other values, in the spelling of the first."""
    if isinstance(value, bool):
        return [repr(not value)]
    if isinstance(value, int) and source.isdecimal():
        # The right value may be anywhere in the row. The steps are small, because some objects,
        # such as times of day, equal numbers that are farther away.
        first = value - rng.randint(0, min(num, value))
        row = [str(number) for number in range(first, first + num + 1) if number != value]
        return rng.sample(row, len(row))
    if isinstance(value, int) or (isinstance(value, float) and abs(value) < _LARGE):
        return _exchanged(source, 0, len(source), value, num, rng)
    if isinstance(value, str | bytes) and (match := _QUOTED.fullmatch(source)):
        found = _exchanged(source, *match.span("body"), value, num, rng)
        return found or [f"{match['start']}{match['body']}s{match['quote']}"]
    return []


def _exchanged(
    source: str, start: int, end: int, value: object, num: int, rng: random.Random
) -> list[str]:
    """Replace one letter or digit by others of its kind; a digit if there is one."""
    places = [at for at in range(start, end) if source[at].isascii() and source[at].isalnum()]
    places = [at for at in places if source[at].isdigit()] or places
    for at in rng.sample(places, len(places)):
        kind = next(letters for letters in _LETTERS if source[at] in letters)
        # A random order, so that the new character does not reveal the old one.
        texts = [source[:at] + letter + source[at + 1 :] for letter in rng.sample(kind, len(kind))]
        if found := [text for text in texts if _is_another(text, value)]:
            return found[:num]
    return []


def _is_another(text: str, value: object) -> bool:
    try:
        other = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return type(other) is type(value) and other != value
