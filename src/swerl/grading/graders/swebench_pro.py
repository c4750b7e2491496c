"""Grade as SWE-bench Pro does: an instance's own parser reports, and all declared tests must pass.

The parser is a file of the Task. It is written again after the tests and reads the log that left
the sandbox, so code under test reaches neither.
"""

from __future__ import annotations

from swerl.core.contracts import Grader
from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.log_parsers import json_report
from swerl.grading.statuses import Judgement, judge_lists


def build() -> Grader:
    return FlowGrader(_judge, parser=json_report, reads_report=True)


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    if not spec.fail_to_pass:
        return Judgement(Verdict.INVALID, "the task declares no test that the patch must fix")
    if not report.left:
        return Judgement(Verdict.UNSOLVED, "the tests left no report")
    # This benchmark accepts only PASSED: no skips, no expected failures.
    passed = {
        test: status if status is TestStatus.PASSED else TestStatus.FAILED
        for test, status in report.statuses.items()
    }
    return judge_lists(spec, passed)
