"""Grade as SWE-bench does: hidden test patch, its runners' logs, and the two lists of tests."""

from __future__ import annotations

import re

from swerl.core.contracts import Grader
from swerl.core.grade import Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.statuses import Judgement, judge_lists

_NO_STATUS = re.compile(
    r"^(?:FAIL Required|ERROR: Coverage|Jest: .*threshold| +\d+ failing$|. fail [1-9])", re.M
)
"""Lines that explain an exit code and are no status: low coverage, counts of failures."""


def build() -> Grader:
    return FlowGrader(_judge)


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    if not spec.fail_to_pass:
        return Judgement(Verdict.INVALID, "the task declares no test that the patch must fix")
    judged = judge_lists(spec, report.statuses)
    some_fail = any(status.fails for status in report.statuses.values())
    is_explained = not report.exit_code or some_fail or _NO_STATUS.search(report.log)
    if judged.verdict is Verdict.SOLVED and not is_explained:
        reason = f"exit code {report.exit_code}, but the log reports no failing test"
        return Judgement(Verdict.UNSOLVED, reason, judged.tests)
    return judged
