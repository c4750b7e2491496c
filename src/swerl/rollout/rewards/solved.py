"""1 for a solved Task, 0 for everything else; a timeout counts as unsolved."""

from __future__ import annotations

from swerl.core.contracts import Attempt
from swerl.core.grade import Verdict


def reward(attempt: Attempt) -> float:
    """Return 1 if the tests pass."""
    return float(attempt.grade.verdict is Verdict.SOLVED)
