"""Grade as SWE-bench does: hidden test patch, its runners' logs, and the two lists of tests."""

from __future__ import annotations

from swerl.errors import UnknownNameError
from swerl.grade import Grade, TestStatus, Verdict
from swerl.graders._flow import TestRun, grade
from swerl.graders._log_parsers import find_parser
from swerl.graders._verdict import Judgement, judge_lists
from swerl.interfaces import Grader, Sandbox
from swerl.task import Task

_BAD = frozenset({TestStatus.FAILED, TestStatus.ERROR})


def build() -> Grader:
    """Return the grader."""
    return _SweBenchGrader()


class _SweBenchGrader:
    async def grade(self, task: Task, patch: str, sandbox: Sandbox) -> Grade:
        return await grade(task, patch, sandbox, _judge)


def _judge(task: Task, run: TestRun) -> Judgement:
    spec = task.grading
    if not spec.fail_to_pass:
        return Judgement(Verdict.INVALID, "the task declares no test that the patch must mend")
    try:
        statuses = find_parser(spec.log_parser)(run.log)
    except UnknownNameError as error:
        return Judgement(Verdict.INVALID, str(error))
    said = judge_lists(spec, statuses)
    if said.verdict is Verdict.SOLVED and run.exit_code and not _BAD & set(statuses.values()):
        reason = f"the test command failed (exit code {run.exit_code}) but reports no failing test"
        return Judgement(Verdict.UNSOLVED, reason, said.tests)
    return said
