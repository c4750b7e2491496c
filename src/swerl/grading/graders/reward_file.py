"""Grade by the reward that a Task's tests write to a file, as Harbor and Open-Instruct do.

The file holds one number, or a JSON object whose `reward` (else its only value) is a number. A Task
is solved by a reward of 1 or more. A log that lists failing tests overrules the file.
"""

from __future__ import annotations

import json
import math
import re

from swerl.core.contracts import Grader
from swerl.core.grade import Verdict
from swerl.core.task import GradingSpec, download_in
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.statuses import Judgement

_MAX_CHARS = 1 << 20
"""Largest file that is read; those of known datasets have less than 10 kB."""
_NO_NETWORK = re.compile(
    r"^.*(?:Could not resolve host|Temporary failure (?:in name resolution|resolving)|"
    r"[Nn]etwork is unreachable|Failed to establish a new connection|unable to resolve host|"
    r"[Dd]ns error|EAI_AGAIN|: (?:command )?not found).*$",
    re.MULTILINE,
)
_RESULT = re.compile(r"\b\d+ (?:passed|failed|errors?|tests? ran)\b|^Ran \d+ tests?", re.MULTILINE)
"""A runner's own count of its tests."""
_MAX_LINE = 200
_KILLED = 128
"""Exit codes from here on mean a signal."""


def build() -> Grader:
    return FlowGrader(_judge, default_parser="pytest")


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    if not spec.report_path:
        return Judgement(Verdict.INVALID, "the task names no file that holds its reward")
    tests = dict(report.statuses)
    reward = _reward(report.left)
    if (reward or 0) < 1 and (line := _unreached(spec, report)):
        return Judgement(Verdict.INVALID, f"the tests did not run for want of a network: {line}")
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


def _unreached(spec: GradingSpec, report: GradingReport) -> str:
    """Return the line of the log that shows why no test ran; empty if one ran.

    Code under test may print such a line. So it counts only if the Task's own script downloads
    something, and if no test has a result.
    """
    if report.statuses or not download_in(spec) or _RESULT.search(report.log):
        return ""
    match = _NO_NETWORK.search(report.log)
    return match[0].strip()[:_MAX_LINE] if match else ""


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
