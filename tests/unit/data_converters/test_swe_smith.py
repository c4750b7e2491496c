"""A SWE-smith Task: the agent gets the bug and no way back; grading gets the tests back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swerl.tasks.datasets import find_converter

from .examples import SMITH

GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"


def run(command: str, folder: Path, stdin: str = "") -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, input=stdin, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "sums.py").write_text(GOOD)
    (tmp_path / "tests" / "test_sums.py").write_text("hidden\n")
    (tmp_path / "tests" / "test_other.py").write_text("kept\n")
    run("git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm one", tmp_path)
    return tmp_path


def test_setup_brings_the_bug_without_a_past_or_its_tests(repository: Path) -> None:
    (repository / "src" / "sums.py").write_text(BAD)
    (repository / "src" / "new.py").write_text("no newline at the end")
    bug = run("git add -A && git diff --cached HEAD", repository)
    run("git reset -q --hard", repository)
    task = find_converter("swe-smith").to_task({**SMITH, "patch": bug})
    run("bash -s", repository, f"{{\n{task.setup}\n}} </dev/null\n")
    assert (repository / "src" / "sums.py").read_text() == BAD
    assert not (repository / "tests" / "test_sums.py").exists()
    assert (repository / "tests" / "test_other.py").exists()
    assert run("git status --porcelain", repository) == ""
    assert run("git rev-list --count HEAD", repository) == "1\n"

    run("git apply --index -", repository, task.gold_patch)
    assert (repository / "src" / "sums.py").read_text() == GOOD
    assert not (repository / "src" / "new.py").exists()
    run(task.grading.test_setup, repository)
    assert (repository / "tests" / "test_sums.py").read_text() == "hidden\n"


@pytest.mark.parametrize(
    "change",
    [
        "printf 'one\\ntwo\\n' >src/sums.py",
        "printf 'no newline' >src/sums.py",
        "rm src/sums.py",
        "git mv src/sums.py src/moved.py && printf 'x\\n' >>src/moved.py",
        "chmod +x src/sums.py && printf 'x\\n' >>src/sums.py",
        "printf -- '--- a\\n+++ b\\n@@ -1 +1 @@\\n' >src/new.py && printf '' >src/empty.py",
        "printf -- '-- a\\n++ b\\n' >>src/sums.py && rm tests/test_other.py",
    ],
)
def test_the_solution_reverts_any_bug(repository: Path, change: str) -> None:
    run(change, repository)
    bug = run("git add -A && git diff --cached --binary HEAD", repository)
    buggy = run("git write-tree", repository)
    task = find_converter("swe-smith").to_task({**SMITH, "patch": bug})
    run("git apply --index -", repository, task.gold_patch)
    assert run("git status --porcelain", repository) == ""
    run("git apply --index -", repository, bug)
    assert run("git write-tree", repository) == buggy
