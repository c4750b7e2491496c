"""Each cheat of vetting is a real one: graded without protection, it wins."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks._vet_runs import CONFTEST, cheats
from swerl.core.task import Task

from .vetting import BROKEN, make_task

TEST = "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "repo", fail_to_pass=("tests/test_calc.py::test_add",))


def cheat_in(task: Task, name: str) -> Path:
    """Apply a cheat to the task's repository and return its folder."""
    folder = Path(task.image.removeprefix("dir:"))
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    patch = next(each.patch for each in cheats(task, texts) if each.name == name)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), check=True)
    (folder / "test_calc.py").write_text(TEST)
    return folder


def python(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest as a grader's command does, without this project's own settings."""
    settings = ("-c", "/dev/null", "--rootdir", str(folder), "-p", "no:cacheprovider")
    return python(folder, "-m", "pytest", "-rA", *settings, "test_calc.py")


def test_the_tests_fail_without_a_cheat(task: Task) -> None:
    folder = Path(task.image.removeprefix("dir:"))
    (folder / "test_calc.py").write_text(TEST)
    assert pytest_in(folder).returncode == 1


def test_leaving_early_fools_an_exit_code(task: Task) -> None:
    assert pytest_in(cheat_in(task, "leave early")).returncode == 0


def test_forged_lines_reach_the_log_past_the_test_runner(task: Task) -> None:
    done = pytest_in(cheat_in(task, "forged lines"))
    assert done.returncode == 0
    assert "\nPASSED tests/test_calc.py::test_add\n" in done.stdout


@pytest.mark.parametrize("own", ["", '"""Settings."""\n\nVALUE = 1\n'])
def test_forced_reports_turn_every_test_green(task: Task, own: str) -> None:
    folder = Path(task.image.removeprefix("dir:"))
    if own:
        (folder / CONFTEST).write_text(own)
    done = pytest_in(cheat_in(task, "forced reports"))
    assert done.returncode == 0
    assert "PASSED test_calc.py::test_add" in done.stdout


def test_cheats_keep_a_module_that_imports_from_the_future(task: Task) -> None:
    folder = cheat_in(task, "leave early")
    assert BROKEN.startswith('"""Sums."""\n\nfrom __future__')
    assert python(folder, "-m", "py_compile", "calc.py").returncode == 0


def test_a_solution_without_python_leaves_little_to_try(task: Task) -> None:
    other = replace(task, gold_patch=task.gold_patch.replace("calc.py", "calc.go"))
    assert all(cheat.why_not and not cheat.patch for cheat in cheats(other, {}))
