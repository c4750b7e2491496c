"""The verdict after a second run with canaries, if an exit code or a number solved the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swerl.core.grade import Canary, Grade, Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import _compared

SOLVED = Grade(Verdict.SOLVED, "exit code 0", test_s=1.0)
NAMED = Grade(Verdict.UNSOLVED, "exit code 1", log="FAIL: test_canary (t.T)", test_s=2.0)
OTHERS = replace(NAMED, log="FAIL: test_canary (t.T)\nFAILED t.py::T::test_other[1] - no")
MUTE = Grade(Verdict.UNSOLVED, "exit code 1", log="FAILED", test_s=2.0)


@pytest.mark.parametrize(
    ("second", "canary", "verdict", "seen"),
    [
        (NAMED, None, Verdict.SOLVED, Canary.FAILED),
        (NAMED, True, Verdict.SOLVED, Canary.FAILED),
        (OTHERS, None, Verdict.UNSOLVED, Canary.FAILED),
        (OTHERS, True, Verdict.UNSOLVED, Canary.FAILED),
        (MUTE, None, Verdict.SOLVED, Canary.NONE),
        (MUTE, True, Verdict.CHEAT, Canary.MISSING),
        (SOLVED, None, Verdict.UNSOLVED, Canary.PASSED),
        (SOLVED, True, Verdict.CHEAT, Canary.PASSED),
        (Grade(Verdict.INFRA, "lost"), True, Verdict.INFRA, Canary.NONE),
        (Grade(Verdict.TIMEOUT, "slow"), None, Verdict.TIMEOUT, Canary.NONE),
    ],
)
def test_the_verdict_after_a_second_run(
    second: Grade, canary: bool | None, verdict: Verdict, seen: Canary
) -> None:
    spec = GradingSpec("command", canary=canary)
    found = _compared(spec, SOLVED, second, ("test_canary",))
    assert (found.verdict, found.canary) == (verdict, seen)
    assert found.test_s == 1.0 + second.test_s
