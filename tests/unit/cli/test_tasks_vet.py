"""`swerl tasks vet`: what it writes and says, and that nothing it has done is lost."""

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
from click.testing import Result
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.certificate import objection
from swerl.core.errors import InputError, UnknownNameError
from swerl.core.task import read_tasks, write_tasks
from tests.unit.checks.vetting import TESTS, make_task

PATIENCE_S = 120.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of a sound task and of one whose solution fails."""
    sound = make_task(tmp_path / "image", "calc-sum-1")
    wrong = {**sound.grading.test_files, "tests/test_calc.py": TESTS.replace("5)", "6)")}
    broken = replace(sound.grading, test_files=wrong)
    write_tasks(tmp_path / "tasks.jsonl", [sound, replace(sound, id="calc-sum-2", grading=broken)])
    return tmp_path / "tasks.jsonl"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(typer_app, ["tasks", "vet", *map(str, arguments)])


def ids(path: Path) -> list[str]:
    return [task.id for task in read_tasks(path)]


def test_certified_and_rejected_tasks_go_to_two_files(file: Path) -> None:
    done = call(file, "--gold-runs", 1)
    assert done.exit_code == 0, (done.output, done.exception)
    certified, rejected = (file.with_name(f"tasks.certified{x}.jsonl") for x in ("", ".rejected"))
    assert ids(certified) == ["calc-sum-1"]
    assert ids(rejected) == ["calc-sum-2"]
    assert [objection(task) for task in read_tasks(certified)] == [""]
    assert "solution fails" in objection(next(read_tasks(rejected)))
    assert "solution fails" in done.stdout
    assert f"1 certified: {certified}" in " ".join(done.stderr.split())
    assert f"rollout --tasks {file} --instance calc-sum-2 --engine scripted:gold" in done.stderr


@pytest.mark.integration
def test_tasks_without_a_list_of_tests_get_one(file: Path) -> None:
    sound = next(read_tasks(file))
    bare = replace(sound.grading, fail_to_pass=(), pass_to_pass=())
    write_tasks(file, [replace(sound, grading=bare)])
    for _ in range(2):  # the second call reads what the first one discovered
        done = call(file, "--gold-runs", 1, "--discover")
        assert done.exit_code == 0, (done.output, done.exception)
    [task] = read_tasks(file.with_name("tasks.certified.jsonl"))
    assert set(task.grading.fail_to_pass) == set(sound.grading.fail_to_pass)
    assert set(task.grading.pass_to_pass) == set(sound.grading.pass_to_pass)
    assert len(file.with_name("tasks.discoveries.jsonl").read_text().splitlines()) == 1


def test_one_task_after_the_other_comes_to_the_same_files(file: Path) -> None:
    out = file.with_name("out.jsonl")
    for name, expected in (("calc-sum-2", []), ("calc-sum-1", ["calc-sum-1"])):
        done = call(file, "--gold-runs", 1, "--instance", name, "-o", out, "--json")
        assert [each["task"] for each in json.loads(done.stdout)] == [name]
        assert ids(out) == expected
    assert ids(file.with_name("out.rejected.jsonl")) == ["calc-sum-2"]


def test_wrong_input_is_one_error_with_a_hint(file: Path) -> None:
    assert isinstance(call(file, "--instance", "calc-sum-3").exception, UnknownNameError)
    assert isinstance(call(file.with_name("none.jsonl")).exception, InputError)
    assert isinstance(call(file, "-o", file).exception, InputError)
    journal = file.with_name("tasks.certified.journal.jsonl")
    journal.write_text('{"something": "else"}\n')
    error = call(file).exception
    assert isinstance(error, InputError)
    assert "-o" in error.hint


def test_two_at_once_are_kept_apart(file: Path) -> None:
    with start(file) as first:
        journal = journal_of(first, file)
        error = call(file).exception
        assert isinstance(error, InputError)
        assert str(journal) in str(error)
        first.kill()


@pytest.mark.integration
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_vetting_that_was_broken_off_goes_on(file: Path, how: signal.Signals) -> None:
    sound = next(read_tasks(file))
    write_tasks(file, [sound, replace(sound, id="calc-sum-4"), replace(sound, id="calc-sum-5")])
    with start(file) as first:
        journal = journal_of(first, file, num_lines=1)
        os.killpg(first.pid, how)
        code = first.wait(timeout=PATIENCE_S)
        assert code == (130 if how is signal.SIGINT else -signal.SIGKILL)
    kept = journal.read_text()
    assert 1 <= kept.count("\n") < 3
    if how is signal.SIGKILL:
        journal.write_text(kept + '{"task": "calc-sum-4", "ok"')
    done = call(file, "--gold-runs", 1, "--jobs", 1)
    assert done.exit_code == 0, (done.output, done.exception)
    assert journal.read_text().startswith(kept)
    assert ids(file.with_name("tasks.certified.jsonl")) == [
        "calc-sum-1",
        "calc-sum-4",
        "calc-sum-5",
    ]


def start(file: Path) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own."""
    arguments = ["tasks", "vet", str(file), "--gold-runs", "1", "--jobs", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "swerl", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def journal_of(process: subprocess.Popen[bytes], file: Path, *, num_lines: int = 0) -> Path:
    """Wait until the command holds its journal and has written so many lines."""
    journal = file.with_name("tasks.certified.journal.jsonl")
    deadline = time.monotonic() + PATIENCE_S
    while not journal.exists() or journal.read_text().count("\n") < num_lines:
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return journal
