"""From the lines of a log to one status per test, and from statuses to a Verdict."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeAlias

from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import GradingSpec

Statuses: TypeAlias = dict[str, TestStatus]
Parser: TypeAlias = Callable[[str], Statuses]
Line: TypeAlias = tuple[str, TestStatus]

NUM_NAMED = 3
"""Tests that a reason names; the rest are counted."""
_WEIGHT = {TestStatus.FAILED: 2, TestStatus.ERROR: 2, TestStatus.SKIPPED: 1}
"""Weight of a line among the lines of one test; every kind of pass has weight 0."""


def lines(log: str) -> Iterator[str]:
    """Yield the lines of a log, stripped; blank lines are left out."""
    return filter(None, map(str.strip, log.split("\n")))


def worst(lines: Iterable[Line]) -> Statuses:
    """Return the status of each test: its worst line, and the last of equally bad ones."""
    found: Statuses = {}
    for name, status in lines:
        if name not in found or _WEIGHT.get(status, 0) >= _WEIGHT.get(found[name], 0):
            found[name] = status
    return found


def by_line(pattern: str, words: Mapping[str, TestStatus]) -> Parser:
    """Return a parser that matches the pattern at the start of each stripped line.

    The pattern has the groups `status`, which is looked up in `words`, and `name`. It must take
    linear time, because code under test prints the lines: no two adjacent parts may match the same
    run of characters.
    """
    compiled = re.compile(pattern)

    def parse(log: str) -> Statuses:
        matches = map(compiled.match, lines(log))
        return worst((match["name"], words[match["status"]]) for match in matches if match)

    return parse


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
    names = (*spec.fail_to_pass, *spec.pass_to_pass)
    # Sorted once: a hostile log names very many tests, and a Task may declare many cut ids.
    ordered = sorted(statuses) if any(map(_is_cut, names)) else []
    tests = {name: status_of(name, statuses, ordered) for name in names}
    must_run = set(spec.fail_to_pass)
    bad = [
        name
        for name, status in tests.items()
        if not (status.passes if name in must_run else status.is_good)
    ]
    if not bad:
        return Judgement(Verdict.SOLVED, f"all {len(tests)} declared tests pass", tests)
    named = ", ".join(f"{name} ({tests[name]})" for name in bad[:NUM_NAMED])
    more = f" and {len(bad) - NUM_NAMED} more" if len(bad) > NUM_NAMED else ""
    reason = f"{len(bad)} of {len(tests)} declared tests do not pass: {named}{more}"
    return Judgement(Verdict.UNSOLVED, reason, tests)


def status_of(
    name: str, statuses: Mapping[str, TestStatus], ordered: Sequence[str] | None = None
) -> TestStatus:
    """Return a declared test's status; `ordered` are the sorted names, if the caller has them.

    Some datasets cut a parametrised id at its first space, so that a bracket stays open. Such an id
    means every test that it begins, and passes if all of them do. If some pass and some are
    skipped, its status is MISSING.
    """
    if name in statuses:
        return statuses[name]
    if not _is_cut(name):
        return TestStatus.MISSING
    ordered = sorted(statuses) if ordered is None else ordered
    following = islice(ordered, bisect_left(ordered, name), None)
    tests = takewhile(lambda test: test.startswith(name), following)
    matches = {statuses[test] for test in tests}
    for status in (TestStatus.FAILED, TestStatus.ERROR):
        if status in matches:
            return status
    if all(status.passes for status in matches) or matches == {TestStatus.SKIPPED}:
        return next(iter(sorted(matches)), TestStatus.MISSING)
    return TestStatus.MISSING


def _is_cut(name: str) -> bool:
    return name.count("[") > name.count("]")
