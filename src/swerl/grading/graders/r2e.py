"""Grade as R2E-Gym does: the whole report must equal the one recorded with the solution.

A recorded report may hold failures, so neither the exit code nor a single test decides.
"""

from __future__ import annotations

from swerl.core.contracts import Grader
from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import GradingSpec
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.python_logs import r2e
from swerl.grading.statuses import NUM_NAMED, Judgement


def build() -> Grader:
    return FlowGrader(_judge, parser=r2e)


def _judge(spec: GradingSpec, report: GradingReport) -> Judgement:
    expected = {name: status.lower() for name, status in spec.expected.items()}
    if not expected:
        return Judgement(Verdict.INVALID, "the task records no expected report")
    found = report.statuses
    tests = {name: found.get(name, TestStatus.MISSING) for name in expected}
    wrong = [
        f"{name} ({tests[name]})" for name, status in expected.items() if tests[name] != status
    ]
    wrong += [f"{name} (not expected)" for name in found if name not in expected]
    if not wrong:
        return Judgement(Verdict.SOLVED, f"all {len(expected)} tests are as recorded", tests)
    more = f" and {len(wrong) - NUM_NAMED} more" if len(wrong) > NUM_NAMED else ""
    reason = f"{len(wrong)} tests differ from the record: {', '.join(wrong[:NUM_NAMED])}{more}"
    return Judgement(Verdict.UNSOLVED, reason, tests)
