"""Grade with a Task's own test command, judged by the tests that the Task declares.

A Task without declared tests is judged by the exit code: nothing else is known about it.
"""

from __future__ import annotations

from swerl.core.contracts import Fresh, Grader, Sandbox
from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import Report, Rules, grade
from swerl.grading.log_parsers import find_parser
from swerl.grading.statuses import Parser
from swerl.grading.verdict import Judgement, judge_lists

_DEFAULT_PARSER = "status_lines"


def build() -> Grader:
    """Return the grader."""
    return _CommandGrader()


class _CommandGrader:
    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        return await grade(task, patch, sandbox, Rules(_parser, _judge), fresh)


def _parser(spec: GradingSpec) -> Parser:
    return find_parser(spec.log_parser or _DEFAULT_PARSER)


def _judge(spec: GradingSpec, report: Report) -> Judgement:
    if spec.fail_to_pass or spec.pass_to_pass:
        return judge_lists(spec, report.statuses)
    verdict = Verdict.UNSOLVED if report.exit_code else Verdict.SOLVED
    return Judgement(verdict, f"the test command ended with exit code {report.exit_code}")
