"""The `reward_file` grader: the tests write a number, which must be able to be low."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.grade import Canary, Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.graders import reward_file
from tests.grading._folder_sandbox import FolderSandbox
from tests.grading.conftest import GOLD

HONEST = "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
SCRIPT = """\
cd {workdir}
if PYTHONPATH=. {python} -m pytest -q -p no:cacheprovider {tests}/test_outputs.py
then echo {good} > {reward}; else echo 0 > {reward}; fi
"""


@pytest.fixture
def judged(task: Task, tmp_path: Path) -> Callable[..., Task]:
    """Build a Task whose script writes a reward."""

    def build(*, good: str = "1", script: str = SCRIPT, canary: bool | None = None) -> Task:
        tests, reward = tmp_path / "hidden", tmp_path / "reward.txt"
        text = script.format(
            workdir=task.workdir, python=sys.executable, tests=tests, reward=reward, good=good
        )
        spec = GradingSpec(
            "reward_file",
            files={f"{tests}/test.sh": text, f"{tests}/test_outputs.py": HONEST},
            test_command=f"bash {tests}/test.sh",
            report_path=str(reward),
            timeout_s=60.0,
            canary=canary,
        )
        return replace(task, grading=spec)

    return build


async def grade(task: Task, patch: str) -> Grade:
    return await reward_file.build().grade(task, patch, FolderSandbox())


def rewrite(text: str) -> str:
    """Return a patch that makes calc.py this text."""
    new = "".join(f"+{line}\n" for line in text.splitlines())
    return (
        "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
        f"@@ -1,2 +1,{len(text.splitlines())} @@\n-def add(a, b):\n-    return a - b\n{new}"
    )


@pytest.mark.parametrize("good", ["1", "1.0", '{{"reward": 1}}', '{{"score": 1, "reward": 1.0}}'])
async def test_a_full_reward_is_solved(judged: Callable[..., Task], good: str) -> None:
    script = SCRIPT.replace("echo {good}", f"echo '{good}'")
    result = await grade(judged(script=script), GOLD)
    assert (result.verdict, result.canary) == (Verdict.SOLVED, Canary.FAILED)


@pytest.mark.parametrize(
    "good",
    ["0.5", "0", "NaN", "Infinity", "true", "yes", "", '{{"a": 1, "b": 1}}', "[1]", "[" * 5000],
    ids=lambda good: good[:20],
)
async def test_anything_else_is_not(judged: Callable[..., Task], good: str) -> None:
    script = SCRIPT.replace("echo {good}", f"echo '{good}'")
    assert (await grade(judged(script=script), GOLD)).verdict is Verdict.UNSOLVED


async def test_no_solution_is_unsolved(judged: Callable[..., Task]) -> None:
    result = await grade(judged(), "")
    assert (result.verdict, result.reason) == (
        Verdict.UNSOLVED,
        "the tests wrote a reward of 0",
    )


async def test_a_reward_from_before_the_tests_is_gone(
    judged: Callable[..., Task], tmp_path: Path
) -> None:
    (tmp_path / "reward.txt").write_text("1")
    result = await grade(judged(script="exit 0"), GOLD)
    assert (result.verdict, result.reason) == (Verdict.UNSOLVED, "the tests wrote no reward")


async def test_a_planted_reward_and_an_early_end_do_not_count(
    judged: Callable[..., Task], tmp_path: Path
) -> None:
    reward = tmp_path / "reward.txt"
    forger = (
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(reward)!r}).write_text('1')\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "os._exit(0)\n"
    )
    result = await grade(judged(), rewrite(forger))
    assert result.verdict is Verdict.UNSOLVED
    assert "void" in result.reason or "killed" in result.reason


async def test_a_test_that_always_passes_is_found_by_the_second_run(
    judged: Callable[..., Task],
) -> None:
    forger = rewrite("import os\nos._exit(0)\n")
    vetted = await grade(judged(canary=True), forger)
    assert (vetted.verdict, vetted.canary) == (Verdict.CHEAT, Canary.PASSED)


async def test_a_task_that_is_not_vetted_is_unsolved_by_it(judged: Callable[..., Task]) -> None:
    result = await grade(judged(), rewrite("import os\nos._exit(0)\n"))
    assert (result.verdict, result.canary) == (Verdict.UNSOLVED, Canary.PASSED)


async def test_a_log_with_failures_overrules_the_file(judged: Callable[..., Task]) -> None:
    script = "echo 'FAILED test_outputs.py::test_add'; echo 1 > {reward}"
    result = await grade(judged(script=script), GOLD)
    assert result.verdict is Verdict.UNSOLVED
    assert "test_outputs.py::test_add fails" in result.reason


async def test_no_path_is_an_invalid_task(judged: Callable[..., Task]) -> None:
    task = judged()
    task = replace(task, grading=replace(task.grading, report_path=""))
    assert (await grade(task, GOLD)).verdict is Verdict.INVALID
