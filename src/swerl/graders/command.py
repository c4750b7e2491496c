"""Grade with a Task's own test command, judged by the tests that the Task declares.

A Task without declared tests is judged by the exit code: nothing else is known about it.
"""

from __future__ import annotations

from swerl.errors import UnknownNameError
from swerl.grade import Grade, Verdict
from swerl.graders._flow import TestRun, grade
from swerl.graders._log_parsers import find_parser
from swerl.graders._verdict import Judgement, judge_lists
from swerl.interfaces import Grader, Sandbox
from swerl.task import Task

_DEFAULT_PARSER = "status_lines"


def build() -> Grader:
    """Return the grader."""
    return _CommandGrader()


class _CommandGrader:
    async def grade(self, task: Task, patch: str, sandbox: Sandbox) -> Grade:
        return await grade(task, patch, sandbox, _judge)


def _judge(task: Task, run: TestRun) -> Judgement:
    spec = task.grading
    if not (spec.fail_to_pass or spec.pass_to_pass):
        verdict = Verdict.UNSOLVED if run.exit_code else Verdict.SOLVED
        return Judgement(verdict, f"the test command ended with exit code {run.exit_code}")
    try:
        parse = find_parser(spec.log_parser or _DEFAULT_PARSER)
    except UnknownNameError as error:
        return Judgement(Verdict.INVALID, str(error))
    return judge_lists(spec, parse(run.log))
