"""Like `solved`, but an attempt that exceeded a time budget gets -0.5."""

from __future__ import annotations

from swerl.core.contracts import Attempt
from swerl.core.episode import Status
from swerl.core.grade import Verdict


def reward(attempt: Attempt) -> float:
    """Return 1 if the tests pass, -0.5 after a time-out of the agent or of the tests."""
    verdict = attempt.grade.verdict
    if verdict is Verdict.TIMEOUT or attempt.status is Status.TIMEOUT:
        return -0.5
    return float(verdict is Verdict.SOLVED)
