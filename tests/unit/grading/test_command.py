"""The `command` grader on a small real repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.core.changes import Changes, TreeFile, diff
from swerl.core.errors import SandboxLostError
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.core.sandbox import Exec
from swerl.core.task import Task
from swerl.grading.graders import command
from tests.unit.grading._folder_sandbox import FolderSandbox, opener
from tests.unit.grading.conftest import GOLD


async def grade(task: Task, patch: str) -> Grade:
    return await command.build().grade(task, patch, opener(task))


async def test_known_changes_are_solved(task: Task) -> None:
    old = TreeFile((Path(task.workdir) / "calc.py").read_bytes())
    new = TreeFile(old.data.replace(b"a - b", b"a + b"))
    changes = Changes({"calc.py": new}, {"calc.py": old})
    result = await command.build().grade(task, changes, opener(task))
    assert result.verdict is Verdict.SOLVED
    assert result.tests == {"test_add": TestStatus.PASSED, "test_zero": TestStatus.PASSED}


async def test_no_patch_is_unsolved_and_names_the_test(task: Task) -> None:
    result = await grade(task, "")
    assert result.verdict is Verdict.UNSOLVED
    assert "test_add (failed)" in result.reason
    assert "FAILED test_add" in result.log


LOOSE = GOLD.replace("def add(a, b):", "def  add(a,  b):").replace("@@ -1,2 +1,2", "@@ -7,2 +7,2")


@pytest.mark.parametrize("patch", [LOOSE, GOLD.rstrip("\n")], ids=["moved", "no newline"])
async def test_patch_with_moved_context_or_without_its_last_newline_applies(
    task: Task, patch: str
) -> None:
    assert (await grade(task, patch)).verdict is Verdict.SOLVED


async def test_a_binary_patch_may_lack_its_last_line(with_spec: Callable[..., Task]) -> None:
    patch = GOLD + diff(Changes({"b": TreeFile(b"\0")}, {})).rstrip("\n")
    task = with_spec(test_command="test -f b && PYTHONPATH=. python3 hidden/run.py")
    assert (await grade(task, patch)).verdict is Verdict.SOLVED


@pytest.mark.parametrize("patch", ["not a diff", GOLD.replace("calc.py", "nowhere.py")])
async def test_patch_that_does_not_apply_is_unsolved(task: Task, patch: str) -> None:
    result = await grade(task, patch)
    assert (result.verdict, result.reason) == (Verdict.UNSOLVED, "patch does not apply")


async def test_hidden_files_overrule_the_patch(task: Task) -> None:
    forged = "--- /dev/null\n+++ b/hidden/run.py\n@@ -0,0 +1 @@\n+print('PASSED test_add')\n"
    result = await grade(task, forged)
    assert result.verdict is Verdict.UNSOLVED
    assert result.restored == ("hidden/run.py",)


async def test_exit_code_zero_is_not_enough_if_tests_are_declared(
    with_spec: Callable[..., Task],
) -> None:
    result = await grade(with_spec(test_command="true"), GOLD)
    assert result.verdict is Verdict.UNSOLVED
    assert set(result.tests.values()) == {TestStatus.MISSING}


@pytest.mark.parametrize(("code", "verdict"), [(0, Verdict.SOLVED), (3, Verdict.UNSOLVED)])
async def test_exit_code_decides_if_no_test_is_declared(
    with_spec: Callable[..., Task], code: int, verdict: Verdict
) -> None:
    task = with_spec(fail_to_pass=(), pass_to_pass=(), test_command=f"exit {code}")
    assert (await grade(task, "")).verdict is verdict


async def test_marker_word_is_not_visible_to_the_tests(with_spec: Callable[..., Task]) -> None:
    spy = "tr '\\0' ' ' </proc/$PPID/cmdline; env"
    result = await grade(with_spec(test_command=spy), GOLD)
    assert result.log
    assert "tests begin" not in result.log


async def test_endless_tests_time_out(with_spec: Callable[..., Task]) -> None:
    result = await grade(with_spec(test_command="sleep 60", timeout_s=0.1), GOLD)
    assert result.verdict is Verdict.TIMEOUT


async def test_killed_shell_is_unsolved(with_spec: Callable[..., Task]) -> None:
    forged = "echo PASSED test_add; echo PASSED test_zero; kill -9 $PPID"
    result = await grade(with_spec(test_command=forged), GOLD)
    assert result.verdict is Verdict.UNSOLVED
    assert "killed" in result.reason


async def test_lost_sandbox_is_infra(task: Task) -> None:
    class Lost(FolderSandbox):
        async def run(self, *args: object, **options: object) -> Exec:
            raise SandboxLostError("gone")

    result = await command.build().grade(task, GOLD, opener(task, Lost()))
    assert (result.verdict, result.reason) == (Verdict.INFRA, "the sandbox failed: gone")


async def test_unknown_parser_is_invalid(with_spec: Callable[..., Task]) -> None:
    result = await grade(with_spec(log_parser="pytst"), GOLD)
    assert result.verdict is Verdict.INVALID
    assert "pytst" in result.reason


async def test_test_patch_is_applied_over_restored_files(
    with_spec: Callable[..., Task], task: Task
) -> None:
    test_patch = (
        "diff --git a/test_calc.py b/test_calc.py\n--- a/test_calc.py\n+++ b/test_calc.py\n"
        "@@ -3,3 +3,3 @@\n \n def test_zero():\n-    pass\n+    assert calc.add(0, 0) == 0\n"
    )
    edit = test_patch.replace("assert calc.add(0, 0) == 0", "return")
    result = await grade(with_spec(test_patch=test_patch), edit + GOLD)
    assert result.verdict is Verdict.SOLVED
    assert result.restored == ("test_calc.py",)
    assert "assert calc.add" in (Path(task.workdir) / "test_calc.py").read_text()


async def test_broken_test_patch_is_invalid_without_a_patch(with_spec: Callable[..., Task]) -> None:
    result = await grade(with_spec(test_patch=GOLD.replace("a - b", "a * b")), "")
    assert result.verdict is Verdict.INVALID
