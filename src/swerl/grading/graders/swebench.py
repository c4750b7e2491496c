"""Grade as SWE-bench does: hidden test patch, its runners' logs, and the two lists of tests."""

from __future__ import annotations

from swerl.core.contracts import Fresh, Grader, Sandbox
from swerl.core.grade import Canary, Grade, TestStatus, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import Report, Rules, grade
from swerl.grading.log_parsers import find_parser
from swerl.grading.statuses import Parser
from swerl.grading.verdict import Judgement, judge_lists

_BAD = frozenset({TestStatus.FAILED, TestStatus.ERROR})


def build() -> Grader:
    """Return the grader."""
    return _SweBenchGrader()


class _SweBenchGrader:
    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        return await grade(task, patch, sandbox, Rules(_parser, _judge), fresh)


def _parser(spec: GradingSpec) -> Parser:
    return find_parser(spec.log_parser)


def _judge(spec: GradingSpec, report: Report) -> Judgement:
    if not spec.fail_to_pass:
        return Judgement(Verdict.INVALID, "the task declares no test that the patch must mend")
    said = judge_lists(spec, report.statuses)
    failing = report.canary is Canary.FAILED or _BAD & set(report.statuses.values())
    if said.verdict is Verdict.SOLVED and report.exit_code and not failing:
        code = report.exit_code
        reason = f"the test command failed (exit code {code}) but reports no failing test"
        return Judgement(Verdict.UNSOLVED, reason, said.tests)
    return said
