"""Each cheat of vetting is a real one: graded without protection, it wins."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks.vet_cheats import CONFTEST, cheats, files_to_change
from swerl.core.grade import TestStatus
from swerl.core.task import Task
from swerl.grading.log_parsers import find_parser
from swerl.grading.statuses import Statuses
from tests.redteam.policy import Defence, Kind, Policy
from tests.redteam.projects import PROJECTS, task_of

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


@pytest.mark.integration
def test_the_tests_fail_without_a_cheat(task: Task) -> None:
    folder = Path(task.image.removeprefix("dir:"))
    (folder / "test_calc.py").write_text(TEST)
    assert pytest_in(folder).returncode == 1


@pytest.mark.parametrize("name", ["leave early", "equal to all"])
def test_a_cheat_fools_an_exit_code(task: Task, name: str) -> None:
    assert pytest_in(cheat_in(task, name)).returncode == 0


def test_forged_lines_reach_the_log_past_the_test_runner(task: Task) -> None:
    done = pytest_in(cheat_in(task, "forged lines"))
    assert done.returncode == 0
    assert "\nPASSED tests/test_calc.py::test_add\n" in done.stdout


@pytest.mark.integration
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


def test_a_solution_in_an_unknown_language_leaves_nothing_to_try(task: Task) -> None:
    other = replace(task, gold_patch=task.gold_patch.replace("calc.py", "calc.lua"))
    assert all(cheat.why_not and not cheat.patch for cheat in cheats(other, {}))


def in_language(kind: Kind, folder: Path) -> Task:
    """Write a project with its tests, and return its Task."""
    probe = PROJECTS[kind].probe
    if subprocess.run(["bash", "-c", probe], capture_output=True).returncode:
        pytest.skip(f"this machine cannot run `{probe}`")
    task = task_of(Policy("p", "s", (), Defence.TESTS, kind=kind))
    inside = {path.removeprefix(f"{task.workdir}/"): text for path, text in task.files.items()}
    for path, text in {**inside, **task.grading.test_files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return task


def run_tests(task: Task, folder: Path) -> Statuses:
    """Run the tests without any protection, and read their log."""
    spec = task.grading
    done = subprocess.run(
        ["bash", "-c", spec.test_command],
        cwd=folder,
        env={**os.environ, **spec.env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return find_parser(spec.log_parser)(done.stdout + done.stderr)


LANGUAGES = sorted(set(PROJECTS) - {Kind.PYTHON, Kind.CLASSES})


@pytest.mark.parametrize("kind", LANGUAGES)
def test_a_cheat_wins_in_every_language_without_protection(kind: Kind, tmp_path: Path) -> None:
    task = in_language(kind, tmp_path)
    texts = {path: (tmp_path / path).read_text() for path in files_to_change(task)[:1]}
    [patch] = [each.patch for each in cheats(task, texts) if each.name == "forged lines"]
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    found = run_tests(task, tmp_path)
    declared = (*task.grading.fail_to_pass, *task.grading.pass_to_pass)
    assert {found.get(test) for test in declared} == {TestStatus.PASSED}


@pytest.mark.parametrize(
    ("path", "text", "first"),
    [
        ("a.js", "#!/usr/bin/env node\n'use strict';\n", "'use strict'"),
        ("a.rb", "# frozen_string_literal: true\n\nmodule A\nend\n", "module"),
    ],
)
def test_code_is_put_behind_lines_that_must_be_first(
    task: Task, path: str, text: str, first: str
) -> None:
    other = replace(task, gold_patch=f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x\n+y\n")
    [patch] = [each.patch for each in cheats(other, {path: text}) if each.name == "leave early"]
    added = [line for line in patch.splitlines() if line.startswith("+") and "exit" in line]
    kept = next(n for n, line in enumerate(patch.splitlines()) if line.startswith(f" {first}"))
    assert added
    assert patch.splitlines().index(added[-1]) < kept
