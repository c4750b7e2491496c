"""A reward: the share of the tests that must pass after the patch."""

from __future__ import annotations

from swerl.core.contracts import Attempt
from swerl.core.grade import Verdict


def test_share(attempt: Attempt) -> float:
    """Return 1 for a solved Task, else half the share of declared tests that pass.

    A cheat gets 0, whatever its tests report.
    """
    grade = attempt.grade
    if grade.verdict is Verdict.SOLVED:
        return 1.0
    if grade.verdict is Verdict.CHEAT or not grade.tests:
        return 0.0
    return 0.5 * sum(each.is_good for each in grade.tests.values()) / len(grade.tests)
