"""Grade as R2E-Gym does: the whole report must equal the one recorded with the solution.

A recorded report may hold failures, so neither the exit code nor a single test decides.
"""

from __future__ import annotations

from swerl.core.contracts import Fresh, Grader, Sandbox
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import Report, Rules, grade
from swerl.grading.python_logs import r2e
from swerl.grading.statuses import Parser
from swerl.grading.verdict import Judgement

_NUM_NAMED = 3
"""Differing tests that a reason names; the rest are counted."""


def build() -> Grader:
    """Return the grader."""
    return _R2eGrader()


class _R2eGrader:
    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        return await grade(task, patch, sandbox, Rules(_parser, _judge), fresh)


def _parser(spec: GradingSpec) -> Parser:
    return r2e


def _judge(spec: GradingSpec, report: Report) -> Judgement:
    expected = {name: status.lower() for name, status in spec.expected.items()}
    if not expected:
        return Judgement(Verdict.INVALID, "the task records no expected report")
    found = report.statuses
    tests = {name: found.get(name, TestStatus.MISSING) for name in expected}
    wrong = [f"{name} ({tests[name]})" for name, want in expected.items() if tests[name] != want]
    wrong += [f"{name} (not expected)" for name in found if name not in expected]
    if not wrong:
        return Judgement(Verdict.SOLVED, f"all {len(expected)} tests are as recorded", tests)
    more = f" and {len(wrong) - _NUM_NAMED} more" if len(wrong) > _NUM_NAMED else ""
    reason = f"{len(wrong)} tests differ from the record: {', '.join(wrong[:_NUM_NAMED])}{more}"
    return Judgement(Verdict.UNSOLVED, reason, tests)
