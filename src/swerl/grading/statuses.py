"""From the lines of a log to one status per test, and from statuses to a Verdict."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import GradingSpec

Statuses: TypeAlias = dict[str, TestStatus]
Parser: TypeAlias = Callable[[str], Statuses]
Line: TypeAlias = tuple[str, TestStatus]

MAX_TESTS = 500_000
"""Largest number of tests of one log; the largest honest one has a tenth."""
_MAX_CHARS = 1 << 26
"""Most characters of the names on all lines of one log: eight times the largest log. A suite's name
becomes a part of each test's."""
NUM_NAMED = 3
"""Tests that a reason names; the rest are counted."""
_WEIGHT = {TestStatus.FAILED: 2, TestStatus.ERROR: 2, TestStatus.SKIPPED: 1}
"""Weight of a line among the lines of one test; every kind of pass has weight 0."""


def lines(log: str) -> Iterator[str]:
    """Yield the lines of a log, stripped; blank lines are left out."""
    return filter(None, map(str.strip, log.split("\n")))


def worst(lines: Iterable[Line]) -> Statuses:
    """Return the status of each test: its worst line, and the last of equally bad ones.

    Raises ValueError on more tests or longer names than an honest log has.
    """
    found: Statuses = {}
    num_chars = 0
    for name, status in lines:
        num_chars += len(name)
        if num_chars > _MAX_CHARS:
            raise ValueError(f"the names of its tests exceed {_MAX_CHARS:,} characters")
        known = found.get(name)
        if known is None:
            if len(found) >= MAX_TESTS:
                raise ValueError(f"it names more than {MAX_TESTS:,} tests")
            found[name] = status
        elif _WEIGHT.get(status, 0) >= _WEIGHT.get(known, 0):
            found[name] = status
    return found


def by_line(pattern: str, words: Mapping[str, TestStatus], *, begins: str = "") -> Parser:
    """Return a parser that matches the pattern at the start of each stripped line.

    A line also starts with each text `begins`, behind half a line that code under test printed.

    The pattern has the groups `status`, which is looked up in `words`, and `name`. It must take
    linear time, because code under test prints the lines: no two adjacent parts may match the same
    run of characters.
    """

    def parse(log: str) -> Statuses:
        if begins:
            log = without_half_lines(log, begins)
        # Compiled at its first use: there are many parsers, and most runs use one.
        matches = map(re.compile(pattern).match, lines(log))
        return worst((match["name"], words[match["status"]]) for match in matches if match)

    return parse


def without_half_lines(log: str, begins: str) -> str:
    """Return the log with a newline before each text `begins` that stands behind half a line."""
    half = re.compile(rf"^(?![ \t]*{begins})(.*?\S)(?={begins})", re.MULTILINE)
    return half.sub(r"\1\n", log)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A Verdict, its one-line reason, and the status of each declared test."""

    verdict: Verdict
    reason: str
    tests: Mapping[str, TestStatus] = field(default_factory=dict)


def judge_lists(spec: GradingSpec, statuses: Mapping[str, TestStatus]) -> Judgement:
    """Judge by the declared tests: all must pass, and a test that is not reported fails.

    A skip is accepted for `pass_to_pass` only: a test that the patch must fix has to run.
    """
    tests = statuses_of((*spec.fail_to_pass, *spec.pass_to_pass), statuses)
    bad = [test for test in failing(spec, statuses) if test in tests]
    if not bad:
        return Judgement(Verdict.SOLVED, f"all {len(tests)} declared tests pass", tests)
    named = ", ".join(f"{name} ({tests[name]})" for name in bad[:NUM_NAMED])
    more = f" and {len(bad) - NUM_NAMED} more" if len(bad) > NUM_NAMED else ""
    reason = f"{len(bad)} of {len(tests)} declared tests do not pass: {named}{more}"
    return Judgement(Verdict.UNSOLVED, reason, tests)


def failing(spec: GradingSpec, statuses: Mapping[str, TestStatus]) -> list[str]:
    """Return the declared tests that have not the required status."""
    must_run = set(spec.fail_to_pass)
    declared = statuses_of((*spec.fail_to_pass, *spec.pass_to_pass, *spec.expected), statuses)

    def is_good(test: str, status: TestStatus) -> bool:
        if test in spec.expected:
            return status == spec.expected[test].lower()
        return status.passes if test in must_run else status.is_good

    return [test for test, status in declared.items() if not is_good(test, status)]


def statuses_of(names: Iterable[str], statuses: Mapping[str, TestStatus]) -> Statuses:
    """Return the status of each declared test; MISSING if none or too little of it is reported.

    If several reported tests belong to one id, all of them must pass. If only some of them are
    skipped, the status is MISSING.
    """
    tests = reported(names, statuses)
    return {name: _together({statuses[each] for each in tests[name]}) for name in tests}


def reported(names: Iterable[str], statuses: Mapping[str, TestStatus]) -> dict[str, list[str]]:
    """Return for each declared id the reported tests that it means.

    Some datasets cut a parametrised id at its first space, so that a bracket stays open. Such an id
    means every test that it begins.
    """
    found = {name: [name] if name in statuses else [] for name in names}
    cut = [name for name, tests in found.items() if not tests and name.count("[") > name.count("]")]
    # Sorted once: a hostile log names very many tests, and a Task may declare many cut ids.
    ordered = sorted(statuses) if cut else []
    for name in cut:
        first = bisect_left(ordered, name)
        end = bisect_left(ordered, True, first, key=lambda test: not test.startswith(name))
        found[name] = ordered[first:end]
    return found


def not_run(statuses: Mapping[str, TestStatus]) -> tuple[str, ...]:
    """Return the tests that were skipped or failed as expected."""
    kinds = (TestStatus.SKIPPED, TestStatus.XFAIL)
    return tuple(test for test, status in statuses.items() if status in kinds)


def _together(found: set[TestStatus]) -> TestStatus:
    for status in (TestStatus.FAILED, TestStatus.ERROR):
        if status in found:
            return status
    is_known = len(found) == 1 or all(status.passes for status in found)
    return min(found, default=TestStatus.MISSING) if is_known else TestStatus.MISSING
