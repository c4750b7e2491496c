"""Grade with a Task's own test command, judged by the tests that the Task declares.

A Task without declared tests is judged by the exit code, the only known result.
"""

from __future__ import annotations

from swerl.core.contracts import Grader
from swerl.core.grade import Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.statuses import Judgement, judge_lists


def build() -> Grader:
    return FlowGrader(_judge, default_parser="status_lines")


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    if spec.fail_to_pass or spec.pass_to_pass:
        return judge_lists(spec, report.statuses)
    verdict = Verdict.UNSOLVED if report.exit_code else Verdict.SOLVED
    return Judgement(verdict, f"the test command ended with exit code {report.exit_code}")
