"""The `script` grader: the listed tests decide, never the exit code alone."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from swerl.core.grade import Confirmation, Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.audit import Audit
from swerl.grading.graders import script
from tests.unit.grading._folder_sandbox import opener
from tests.unit.grading.conftest import GOLD
from tests.unit.grading.test_reward_file import rewrite

pytestmark = pytest.mark.integration

TESTS = """\
import sys

import pytest
import calc


def test_add():
    assert calc.add(2, 3) == 5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
"""
NAME = "test_fail_to_pass.py"


def scripted(task: Task, **changes: object) -> Task:
    spec = GradingSpec(
        "script",
        fail_to_pass=(f"{NAME}::test_add",),
        test_files={NAME: TESTS},
        test_command=f"{sys.executable} {NAME}",
        env={"PYTEST_ADDOPTS": "-rA -p no:cacheprovider"},
        timeout_s=60.0,
    )
    return replace(task, grading=replace(spec, **changes))


async def grade(task: Task, patch: str) -> Grade:
    return await Audit(1.0).grade(script.build(), task, patch, opener(task), text=patch)


@pytest.mark.parametrize("declared", [(f"{NAME}::test_add",), ()])
async def test_the_solution_is_solved_and_nothing_is_not(
    task: Task, declared: tuple[str, ...]
) -> None:
    chosen = scripted(task, fail_to_pass=declared)
    assert (await grade(chosen, "")).verdict is Verdict.UNSOLVED
    assert (await grade(chosen, GOLD)).verdict is Verdict.SOLVED


@pytest.mark.parametrize("declared", [(f"{NAME}::test_add",), ()])
@pytest.mark.parametrize("leave", ["import sys\nsys.exit(0)\n", "import os\nos._exit(0)\n"])
async def test_leaving_early_with_success_proves_nothing(
    task: Task, declared: tuple[str, ...], leave: str
) -> None:
    result = await grade(scripted(task, fail_to_pass=declared), rewrite(leave))
    assert result.verdict is Verdict.UNSOLVED


async def test_a_script_that_pytest_runs_is_confirmed(task: Task) -> None:
    chosen = scripted(task, test_command=f"{sys.executable} -m pytest {NAME}")
    result = await grade(chosen, GOLD)
    assert (result.verdict, result.confirmation) == (Verdict.SOLVED, Confirmation.REAL)
