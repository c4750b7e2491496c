"""From the lines of a log to one status per test, and from statuses to a Verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
_MAX_LINE = 4000
"""Characters of a line that a runner may print; patterns take quadratic time."""


def lines(log: str) -> Iterator[str]:
    """Yield the lines of a log, stripped; lines that are too long are left out."""
    return (line for line in map(str.strip, log.split("\n")) if len(line) <= _MAX_LINE)


def worst(lines: Iterable[Line]) -> Statuses:
    """Return the status of each test: its worst line, and the last of equally bad ones."""
    found: Statuses = {}
    for name, status in lines:
        if name not in found or _WEIGHT.get(status, 0) >= _WEIGHT.get(found[name], 0):
            found[name] = status
    return found


def by_line(pattern: str, words: Mapping[str, TestStatus]) -> Parser:
    """Return a parser that matches the pattern at the start of each stripped line.

    The pattern has the groups `status`, which is looked up in `words`, and `name`.
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
    tests = {name: status_of(name, statuses) for name in (*spec.fail_to_pass, *spec.pass_to_pass)}
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


def status_of(name: str, statuses: Mapping[str, TestStatus]) -> TestStatus:
    """Return a declared test's status.

    Some datasets cut a parametrised id at its first space, so that a bracket stays open. Such an id
    means every test that it begins, and passes if all of them do. If some pass and some are
    skipped, its status is MISSING.
    """
    if name in statuses:
        return statuses[name]
    if name.count("[") <= name.count("]"):
        return TestStatus.MISSING
    matches = {status for test, status in statuses.items() if test.startswith(name)}
    for status in (TestStatus.FAILED, TestStatus.ERROR):
        if status in matches:
            return status
    if all(status.passes for status in matches) or matches == {TestStatus.SKIPPED}:
        return next(iter(sorted(matches)), TestStatus.MISSING)
    return TestStatus.MISSING
