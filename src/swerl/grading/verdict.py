"""From statuses per test to a Verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import GradingSpec

_GOOD = frozenset({TestStatus.PASSED, TestStatus.XFAIL})
_NUM_NAMED = 3
"""Failing tests that a reason names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A Verdict, its one-line reason, and the status of each declared test."""

    verdict: Verdict
    reason: str
    tests: Mapping[str, TestStatus] = field(default_factory=dict)


def judge_lists(spec: GradingSpec, statuses: Mapping[str, TestStatus]) -> Judgement:
    """Judge by the declared tests: all of them must pass; a test that is not reported fails.

    An expected failure counts as a pass. A skip counts for `pass_to_pass` only: a test that the
    patch must mend has to run.
    """
    tests = {name: status_of(name, statuses) for name in (*spec.fail_to_pass, *spec.pass_to_pass)}
    must_run = set(spec.fail_to_pass)
    bad = [name for name, status in tests.items() if not _is_good(status, name in must_run)]
    if not bad:
        return Judgement(Verdict.SOLVED, f"all {len(tests)} declared tests pass", tests)
    named = ", ".join(f"{name} ({tests[name]})" for name in bad[:_NUM_NAMED])
    more = f" and {len(bad) - _NUM_NAMED} more" if len(bad) > _NUM_NAMED else ""
    reason = f"{len(bad)} of {len(tests)} declared tests do not pass: {named}{more}"
    return Judgement(Verdict.UNSOLVED, reason, tests)


def status_of(name: str, statuses: Mapping[str, TestStatus]) -> TestStatus:
    """Return a declared test's status.

    Datasets cut some parametrised ids at their first space, which leaves a bracket open. Such an
    id stands for every test that it begins, and passes when all of them do. Where some pass and
    some are skipped it has no status.
    """
    if name in statuses:
        return statuses[name]
    if name.count("[") <= name.count("]"):
        return TestStatus.MISSING
    matches = {status for test, status in statuses.items() if test.startswith(name)}
    for status in (TestStatus.FAILED, TestStatus.ERROR):
        if status in matches:
            return status
    if matches <= _GOOD or matches == {TestStatus.SKIPPED}:
        return next(iter(sorted(matches)), TestStatus.MISSING)
    return TestStatus.MISSING


def _is_good(status: TestStatus, must_run: bool) -> bool:
    return status in _GOOD or (status is TestStatus.SKIPPED and not must_run)
