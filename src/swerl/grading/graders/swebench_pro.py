"""Grade as SWE-bench Pro does: an instance's own parser reports, all declared tests must pass.

The parser is a file of the Task. It is written anew when the tests are over, and reads the log
that came out of the sandbox, so that code under test reaches neither.
"""

from __future__ import annotations

from swerl.core.contracts import Fresh, Grader, Sandbox
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import Report, Rules, grade
from swerl.grading.log_parsers import json_report
from swerl.grading.statuses import Parser
from swerl.grading.verdict import Judgement, judge_lists


def build() -> Grader:
    """Return the grader."""
    return _SweBenchProGrader()


class _SweBenchProGrader:
    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        return await grade(task, patch, sandbox, Rules(_parser, _judge, reads_report=True), fresh)


def _parser(spec: GradingSpec) -> Parser:
    return json_report


def _judge(spec: GradingSpec, report: Report) -> Judgement:
    if not spec.fail_to_pass:
        return Judgement(Verdict.INVALID, "the task declares no test that the patch must mend")
    if not report.left:
        return Judgement(Verdict.UNSOLVED, "the tests left no report")
    # This benchmark counts nothing but PASSED: no skips, no expected failures.
    passed = {
        test: status if status is TestStatus.PASSED else TestStatus.FAILED
        for test, status in report.statuses.items()
    }
    return judge_lists(spec, passed)
