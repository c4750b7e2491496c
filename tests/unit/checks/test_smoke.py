"""`swerl sandbox smoke`: every image is tried once, and broken ones are reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.checks import smoke
from swerl.checks.smoke import SmokeResult, interpreter_of
from swerl.cli.main import typer_app
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.sandboxes import local
from swerl.sandboxes.ledger import default_ledger


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    plain, repository = tmp_path / "plain", tmp_path / "repository"
    for folder in (plain, repository):
        folder.mkdir()
        (folder / "f.py").write_text("x = 1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    first = Task("a", "r", f"dir:{repository}", "/testbed", "fix it", GradingSpec("command"))
    return [
        first,
        replace(first, id="b"),
        replace(first, id="c", image=f"dir:{plain}"),
        replace(first, id="d", image="built:no-such-image"),
    ]


@pytest.fixture
def file(tasks: list[Task], tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, tasks)
    return path


async def look(task: Task) -> SmokeResult:
    (result,) = await smoke.check(local.build(local.Options()), [task])
    return result


async def test_each_image_is_judged_once_in_order(tasks: list[Task]) -> None:
    heard: list[SmokeResult] = []
    results = await smoke.check(local.build(local.Options()), tasks, on_done=heard.append)
    assert [(result.num_tasks, result.ok) for result in results] == [
        (2, True),
        (1, True),
        (1, False),
    ]
    assert [result.work_tree for result in results] == ["yes", "no", ""]
    assert "Python 3" in results[0].interpreter
    assert results[0].boot_s > results[0].exec_s > 0
    assert "no-such-image" in results[2].failure
    assert sorted(heard, key=results.index) == results


async def test_a_workdir_is_reported_and_never_changed(tasks: list[Task]) -> None:
    plain = Path(tasks[2].image.removeprefix("dir:"))
    assert (await look(tasks[2])).work_tree == "no"
    assert [path.name for path in plain.iterdir()] == ["f.py"]
    missing = await look(replace(tasks[2], base_commit="0" * 40))
    assert "not the top of a git work tree" in missing.failure


async def test_a_repository_without_the_base_commit_fails(tasks: list[Task]) -> None:
    git = Path(tasks[0].image.removeprefix("dir:")) / ".git"
    (head,) = (git / "refs" / "heads").iterdir()
    assert (await look(replace(tasks[0], base_commit=head.read_text().strip()))).ok
    lacking = await look(replace(tasks[0], base_commit="ab" * 20))
    assert f"lacks the base commit {'ab' * 20}" in lacking.failure


async def test_the_interpreter_of_the_tests_must_run(tasks: list[Task]) -> None:
    def with_command(command: str) -> Task:
        return replace(tasks[0], grading=GradingSpec("command", test_command=command))

    broken = await look(with_command("cd x && .venv/bin/python -m pytest"))
    assert broken.failure.startswith("the interpreter of the tests does not run: .venv/bin/python")
    assert "not found" in broken.failure
    assert (await look(with_command("python3 -m pytest"))).interpreter.startswith("Python 3")
    declared = await look(replace(tasks[0], metadata={"interpreter": "/opt/none/node"}))
    assert "does not run: /opt/none/node" in declared.failure


async def test_one_problem_does_not_hide_another(tasks: list[Task]) -> None:
    spec = GradingSpec("command", test_command="./python -m pytest")
    found = await look(replace(tasks[0], base_commit="ab" * 20, grading=spec))
    assert "does not run: ./python" in found.failure
    assert "lacks the base commit" in found.failure
    assert found.boot_s > 0


@pytest.mark.parametrize(
    ("command", "name", "shell", "is_declared"),
    [
        ("source /opt/x/activate\nconda activate testbed\npytest -rA", "python", "bash", True),
        ("PYTHONWARNINGS='x' .venv/bin/python -W ignore -m pytest", ".venv/bin/python", "sh", True),
        ("cd a && python3.9 setup.py test", "python3.9", "sh", True),
        ("npm test", "python", "sh", False),
        ("pythonic --yes", "python", "sh", False),
        ("", "python", "sh", False),
    ],
)
def test_the_interpreter_is_read_from_the_test_command(
    tasks: list[Task], command: str, name: str, shell: str, is_declared: bool
) -> None:
    spec = GradingSpec("command", test_command=command, env={"A": "b"})
    found = interpreter_of(replace(tasks[0], grading=spec))
    assert (found.name, found.argv[0], found.is_declared) == (name, shell, is_declared)
    assert found.env == {"A": "b"}
    if shell == "bash":
        assert "conda activate testbed" in found.argv[2]


def test_the_command_fails_and_names_the_broken_image(file: Path) -> None:
    done = CliRunner().invoke(typer_app, ["sandbox", "smoke", str(file), "--json"])
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    assert [row["ok"] for row in rows] == [True, True, False]


def test_the_command_shows_a_table_when_all_is_well(tasks: list[Task], file: Path) -> None:
    write_tasks(file, tasks[:2])
    done = CliRunner().invoke(typer_app, ["sandbox", "smoke", str(file), "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert "1 image ready, 0 failed" in done.output


def test_ctrl_c_prints_what_is_checked_and_leaves_no_sandbox(
    tasks: list[Task], file: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    waits = GradingSpec("command", test_command="export PATH=$(sleep 60):$PATH\npython3 -m pytest")
    slow = replace(tasks[0], image=f"dir:{started}", grading=waits)
    started.mkdir()
    write_tasks(file, [tasks[2], slow])
    argv = [sys.executable, "-m", "swerl", "sandbox", "smoke", str(file)]
    before = len(default_ledger().read())
    pipe, env = subprocess.PIPE, {**os.environ, "COLUMNS": "400"}
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        while len([e for e in default_ledger().read()[before:] if e.ended_s]) < 1:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "every sandbox is closed" in " ".join(said.split())
    assert tasks[2].image in shown
    known = default_ledger().read()
    ended = [bool(entry.ended_s) for entry in known if entry.owner.pid == process.pid]
    assert ended == [True, True]


def smoked(folder: Path, image: str, *words: str) -> dict[str, object]:
    spec = GradingSpec("command", test_command="python3 -m pytest")
    write_tasks(folder / "tasks.jsonl", [Task("a", "r", image, "/testbed", "fix", spec)])
    command = ["sandbox", "smoke", str(folder / "tasks.jsonl"), "--json", *words]
    done = CliRunner().invoke(typer_app, command)
    (row,) = json.loads(done.stdout)
    assert isinstance(row, dict)
    return row


def test_an_image_of_a_daemon(dockerd: str, docker_image: str, tmp_path: Path) -> None:
    row = smoked(
        tmp_path, docker_image, "--backend", "docker", "--set", f"sandbox.base_url={dockerd}"
    )
    assert (
        row["failure"] == "the workdir is not the top of a git work tree (give the folder of "
        "the repository as the Task's workdir)"
    )


def test_an_image_that_is_pulled_first(
    pushed_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    row = smoked(tmp_path, pushed_image, "--backend", "local")
    assert float(str(row["boot_s"])) > 0, row
    absent = smoked(tmp_path, pushed_image.replace(":1", ":none"), "--backend", "local")
    assert "none" in str(absent["failure"])
    assert absent["ok"] is False
