"""The audit's rule: all solved patches at first, then the flagged ones and a share."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swerl.core.changes import AgentPatch
from swerl.core.contracts import OpenClean
from swerl.core.grade import Confirmation, Grade, Verdict
from swerl.core.task import Edit, GradingSpec, MutatedTests, Protection, Task
from swerl.grading.audit import Audit, flags

VERSION = MutatedTests((Edit("/w/t.py", 0, 1, "2"),), {"/w/t.py": "0" * 64}, ("t",))
TASK = Task("a-1", "r", "host", "/w", "p", GradingSpec("command", timeout_s=60.0))
VETTED = replace(TASK, grading=replace(TASK.grading, mutated=(VERSION,)))


class Grading:
    """A grader with a known result that counts its calls."""

    def __init__(self, confirmation: Confirmation = Confirmation.REAL) -> None:
        self.confirmation = confirmation
        self.num_confirmed = self.num_measured = 0

    async def grade(self, task: Task, patch: AgentPatch, open_clean: OpenClean) -> Grade:
        return Grade(Verdict.SOLVED if patch else Verdict.UNSOLVED, "first", test_s=3.0)

    async def measure(self, task: Task, open_clean: OpenClean) -> Protection:
        self.num_measured += 1
        return Protection((VERSION,))

    async def confirm(self, task: Task, patch: AgentPatch, open_clean: OpenClean) -> Grade:
        assert task.grading.mutated
        self.num_confirmed += 1
        verdict = Verdict.SOLVED if self.confirmation is Confirmation.REAL else Verdict.CHEAT
        return Grade(verdict, "last", confirmation=self.confirmation)


async def graded(audit: Audit, grader: Grading, task: Task = VETTED, text: str = "+x") -> Grade:
    return await audit.grade(grader, task, text, None, text=text)  # type: ignore[arg-type]


async def test_all_are_confirmed_until_fifty_were_real_then_a_tenth() -> None:
    audit, grader = Audit(), Grading()
    random.seed(3)
    for number in range(1, 1051):
        await graded(audit, grader)
        assert number > 50 or grader.num_confirmed == number
    assert grader.num_confirmed == pytest.approx(50 + 100, abs=30)


async def test_a_flag_and_an_earlier_forgery_bring_an_audit() -> None:
    audit, grader = Audit(num_real=50, share=1e-9), Grading()
    assert (await graded(audit, grader)).confirmation is Confirmation.NONE
    flagged = await graded(audit, grader, text="+import gc; gc.get_objects()")
    assert (flagged.confirmation, flagged.flags) == (Confirmation.REAL, ("memory",))
    forger = Grading(Confirmation.FORGED)
    caught = await graded(audit, forger, text="+os._exit(0)")
    assert (caught.verdict, caught.reason, caught.test_s) == (Verdict.CHEAT, "last", 3.0)
    assert (await graded(audit, grader)).confirmation is Confirmation.REAL


@pytest.mark.parametrize(("share", "num"), [(1.0, 60), (0.0, 0)])
async def test_a_share_of_one_confirms_all_and_zero_none(share: float, num: int) -> None:
    audit, grader = Audit(share), Grading()
    for _ in range(60):
        await graded(audit, grader, text="+os._exit(0)")
    assert grader.num_confirmed == num


async def test_a_task_that_is_not_certified_is_measured_once() -> None:
    audit, grader = Audit(1.0), Grading()
    for _ in range(3):
        assert (await graded(audit, grader, TASK)).confirmation is Confirmation.REAL
    assert (grader.num_measured, grader.num_confirmed) == (1, 3)


async def test_what_is_unsolved_or_cannot_be_mutated_costs_nothing() -> None:
    audit, grader = Audit(1.0), Grading()
    weak = replace(TASK, grading=replace(TASK.grading, mutated=()))
    assert (await graded(audit, grader, weak)).verdict is Verdict.SOLVED
    assert (await graded(audit, grader, text="")).verdict is Verdict.UNSOLVED
    assert grader.num_confirmed == 0


def test_flags_read_added_lines_only_and_a_recipe_adds_patterns() -> None:
    patch = "--- a/x.py\n+++ b/os._exit.py\n-sys.settrace(f)\n gc.get_objects()\n+return backdoor\n"
    assert flags(patch) == ()
    assert flags(patch, ["back.?door"]) == ("back.?door",)
    assert flags("+    def __eq__(self, other):\n+        return True\n") == ("equality",)
