"""Grade with a script of tests: by the tests that the Task declares, else by its exit code.

pytest is told to list every test, so that a script which leaves early with exit code 0 has shown
nothing.
"""

from __future__ import annotations

from swerl.core.contracts import Fresh, Grader, Sandbox
from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import Report, Rules, grade
from swerl.grading.log_parsers import find_parser
from swerl.grading.statuses import Parser
from swerl.grading.verdict import Judgement, judge_lists

_DEFAULT_PARSER = "pytest"


def build() -> Grader:
    """Return the grader."""
    return _ScriptGrader()


class _ScriptGrader:
    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        return await grade(task, patch, sandbox, Rules(_parser, _judge), fresh)


def _parser(spec: GradingSpec) -> Parser:
    return find_parser(spec.log_parser or _DEFAULT_PARSER)


def _judge(spec: GradingSpec, report: Report) -> Judgement:
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
