"""Grade with a script of tests: by the tests that the Task declares, else by its exit code.

pytest must list every test, so that a script which leaves early with exit code 0 proves nothing.
"""

from __future__ import annotations

from swerl.core.contracts import Grader
from swerl.core.grade import Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.statuses import Judgement, judge_lists


def build() -> Grader:
    return FlowGrader(_judge, default_parser="pytest")


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    if spec.fail_to_pass or spec.pass_to_pass:
        return judge_lists(spec, report.statuses)
    if report.exit_code:
        return Judgement(Verdict.UNSOLVED, f"the script ended with exit code {report.exit_code}")
    if not report.statuses:
        return Judgement(Verdict.UNSOLVED, "the script ended well and reports no test")
    bad = [test for test, status in report.statuses.items() if not status.is_good]
    if bad:
        return Judgement(Verdict.UNSOLVED, f"the script ended well, but {bad[0]} does not pass")
    return Judgement(Verdict.SOLVED, f"all {len(report.statuses)} reported tests pass")
