"""Grade by the reward that a Task's tests write to a file, as Harbor and Open-Instruct do.

The file holds one number, or a JSON object whose `reward` (else its only value) is a number. A Task
is solved by a reward of 1 or more. A log that lists failing tests overrules the file.
"""

from __future__ import annotations

import json
import math

from swerl.core.contracts import Grader
from swerl.core.grade import Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.statuses import Judgement

_MAX_CHARS = 1 << 20
"""Largest file that is read; those of known datasets have less than 10 kB."""
_KILLED = 128
"""Exit codes from here on mean a signal."""


def build() -> Grader:
    return FlowGrader(_judge, default_parser="pytest")


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    if not spec.report_path:
        return Judgement(Verdict.INVALID, "the task names no file that holds its reward")
    tests = dict(report.statuses)
    reward = _reward(report.left)
    if reward is None:
        return Judgement(Verdict.UNSOLVED, "the tests wrote no reward", tests)
    if report.exit_code >= _KILLED:
        reason = f"the tests were killed (exit code {report.exit_code}), so their reward is void"
        return Judgement(Verdict.UNSOLVED, reason, tests)
    if reward < 1:
        return Judgement(Verdict.UNSOLVED, f"the tests wrote a reward of {reward:g}", tests)
    bad = [test for test, status in tests.items() if status.fails]
    if bad:
        reason = f"the tests wrote a reward of {reward:g}, but their log says that {bad[0]} fails"
        return Judgement(Verdict.UNSOLVED, reason, tests)
    return Judgement(Verdict.SOLVED, f"the tests wrote a reward of {reward:g}", tests)


def _reward(text: str) -> float | None:
    """Read a reward; None if the file holds no finite number that a float can hold."""
    if len(text) > _MAX_CHARS:
        return None
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            found = found.get("reward", next(iter(found.values())) if len(found) == 1 else None)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        reward = float(found)
    except (ValueError, OverflowError, RecursionError):
        return None
    return reward if math.isfinite(reward) else None
