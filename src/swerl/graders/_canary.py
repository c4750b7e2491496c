"""Canaries: tests that must fail, put among the hidden tests of a grading.

Code under test runs in the process that reports on it, so it can make every report say "passed".
It cannot know which of the hidden tests was written to fail: a canary stands beside a declared
test, in the same class, under a name of words of that file. It is a copy of such a test with
another expected value, see `_altered`, else a comparison of words. A canary that is reported as
passed shows that the reports are forged, or that what is tested calls everything equal.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swerl.grade import Canary, TestStatus
from swerl.graders._altered import alter
from swerl.task import GradingSpec

_MAX_FILES = 3
"""Files that get a canary; each costs one failing test."""
_RUNNER_LINE = re.compile(
    r"^.*\b(?:pytest|unittest|runtests|run_tests|bin/test|tox|nose\w*)\b(.*)$", re.MULTILINE
)
"""Lines that start a test runner which collects tests from files by itself."""
_CHOOSES = re.compile(
    r"::|\s(?:-k|-m|-[vqsl]*x[vqsl]*|--exitfirst|--maxfail|--lf|--ff|--sw|--last-failed)(?![\w-])"
)
"""Test commands that pick single tests or stop at a failure leave no room for a canary."""
_ID_WORD = re.compile(r"\w+")
_FAILS = frozenset({TestStatus.FAILED, TestStatus.ERROR})
_PASSES = frozenset({TestStatus.PASSED, TestStatus.XFAIL, TestStatus.XPASS})

_BODY = """\
{indent}def {name}({self}):
{indent}    {value} = {words!r}.split()
{indent}    assert "_".join({value}) == {wrong!r}"""


@dataclass(frozen=True, slots=True)
class Planted:
    """A test file with a canary in it."""

    text: str
    name: str
    """Name of the test that must fail."""


def fits(spec: GradingSpec) -> bool:
    """Say whether the test command would run a canary: as vetting found, else as its text tells."""
    if spec.canary is not None:
        return spec.canary
    scripts = [text for path, text in _files(spec).items() if path.endswith(".sh")]
    lines = _RUNNER_LINE.findall("\n".join([spec.test_command, *scripts]))
    chooses = any(map(_CHOOSES.search, lines))
    return bool(lines) and not chooses


def plant(text: str, spec: GradingSpec, rng: random.Random) -> Planted | None:
    """Put a canary behind a declared test of a Python file; None where none is found.

    Where a Task declares no tests at all, any function that is named as a test will do.
    """
    tree = _parsed(text)
    if tree is None:
        return None
    tests = list(_tests(tree))
    beside = next(
        (
            chosen
            for declared in (_names(spec.fail_to_pass), _names(spec.pass_to_pass))
            if (chosen := [test for test in tests if test.name in declared])
        ),
        None if spec.fail_to_pass or spec.pass_to_pass else _named_as_tests(tests),
    )
    if not beside:
        return None
    lines = text.split("\n")
    taken = {each.name for each in tests}
    for test in rng.sample(beside, len(beside)):
        name, _, _ = _invent(test.name, taken, rng)
        if copy := alter(lines, test, name, rng):
            # Before or after it, so that of two that look the same none is known to be the test.
            planted = _insert(lines, test, copy, name, is_first=rng.random() < 0.5)
            if _parsed(planted.text):
                return planted
    test = rng.choice(beside)
    name, value, words = _invent(test.name, taken, rng)
    canary = _BODY.format(
        indent=lines[test.lineno - 1][: test.col_offset],
        name=name,
        self="self" if test.col_offset else "",
        value=value,
        words=" ".join(words),
        wrong="_".join(words[1:] + words[:1]),
    )
    return _insert(lines, test, canary, name, is_first=False)


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _insert(
    lines: Sequence[str], test: ast.FunctionDef, canary: str, name: str, *, is_first: bool
) -> Planted:
    """Put a canary before or after a test, with as many empty lines between as the file has."""
    top = min([test.lineno, *(each.lineno for each in test.decorator_list)]) - 1
    while top and lines[top - 1].lstrip().startswith("#"):
        top -= 1
    above = itertools.takewhile(lambda line: not line.strip(), reversed(lines[:top]))
    num_empty = sum(1 for _ in above) or (1 if test.col_offset else 2)
    end = "\r" if lines[test.lineno - 1].endswith("\r") else ""
    empty = [end] * num_empty
    own = [line.rstrip("\r") + end for line in canary.split("\n")]
    at = top if is_first else test.end_lineno or len(lines)
    added = [*own, *empty] if is_first else [*empty, *own]
    return Planted("\n".join([*lines[:at], *added, *lines[at:]]), name)


def choose_files(test_files: Iterable[str]) -> list[str]:
    """Return the test files that may get a canary."""
    return [path for path in dict.fromkeys(test_files) if path.endswith(".py")][:_MAX_FILES]


def separate(
    statuses: Mapping[str, TestStatus], names: Iterable[str]
) -> tuple[dict[str, TestStatus], Canary]:
    """Return the statuses without the canaries', and what became of the canaries."""
    wanted = set(names)
    own = {test: found for test in statuses if (found := wanted & set(_ID_WORD.findall(test)))}
    rest = {test: status for test, status in statuses.items() if test not in own}
    if not wanted:
        return rest, Canary.NONE
    if any(statuses[test] in _PASSES for test in own):
        return rest, Canary.PASSED
    failed = set[str]().union(*(own[test] for test in own if statuses[test] in _FAILS))
    return rest, Canary.FAILED if failed == wanted else Canary.MISSING


def _files(spec: GradingSpec) -> Mapping[str, str]:
    return {**spec.files, **spec.test_files}


def _tests(tree: ast.Module) -> Iterable[ast.FunctionDef]:
    """Yield functions of the file and methods of its classes that may be tests."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def _named_as_tests(tests: Iterable[ast.FunctionDef]) -> list[ast.FunctionDef]:
    return [test for test in tests if test.name.startswith("test")]


def _names(tests: Iterable[str]) -> set[str]:
    """Return the words of test ids without their parameters; a function's name is among them."""
    return {word for test in tests for word in _ID_WORD.findall(test.partition("[")[0])}


def _invent(like: str, taken: set[str], rng: random.Random) -> tuple[str, str, list[str]]:
    """Return a new test's name, a variable and words for its body, all of the file's own words."""
    prefix = "test" if like.startswith("test") else like.partition("_")[0]
    words = sorted({word for name in taken for word in name.split("_")[1:] if word.isalpha()})
    words = [word for word in words if word.islower()] + ["value", "result"]
    while True:
        chosen = rng.sample(words, rng.randint(2, min(4, len(words))))
        name = "_".join([prefix, *chosen])
        if name not in taken:
            return name, f"{chosen[0]}_{chosen[-1]}", chosen
        words.append(f"{rng.choice(words)}{len(words)}")
