"""No command replaces a file that it did not write, unless it is told to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.errors import InputError
from swerl.core.task import Task, read_tasks, write_tasks
from tests.unit.cli.test_json import some as some


@pytest.fixture
def tasks(some: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tasks(Path("tasks.jsonl"), some)
    return Path("tasks.jsonl")


def swerl(*arguments: str) -> Result:
    return CliRunner().invoke(typer_app, list(arguments), catch_exceptions=False)


WRITE = {
    "filter": ("tasks", "filter", "tasks.jsonl", "--sample", "1", "-o", "{out}"),
    "export": ("convert", "tasks.jsonl", "--format", "slime", "-o", "{out}"),
    "convert": ("convert", "swe-bench", "--rows", "tasks.jsonl", "-o", "{out}"),
    "rollout": ("rollout", "--engine", "scripted:noop", "-o", "{out}"),
}


@pytest.mark.parametrize("command", WRITE)
def test_a_file_that_exists_stays_as_it_is(command: str, tasks: Path) -> None:
    Path("mine").write_text("my notes")
    with pytest.raises(InputError, match="mine exists already") as caught:
        swerl(*(word.format(out="mine") for word in WRITE[command]))
    # `swerl rollout` writes a folder of many files, and replaces none.
    assert ("--force" in caught.value.hint) == (command != "rollout")
    assert "-o" in caught.value.hint
    assert Path("mine").read_text() == "my notes"


def test_the_input_is_not_replaced_by_its_selection(tasks: Path) -> None:
    with pytest.raises(InputError, match=r"one of the input files|exists already"):
        swerl(*(word.format(out="tasks.jsonl") for word in WRITE["filter"]))
    assert len(list(read_tasks(tasks))) == 3


def test_force_replaces_it(tasks: Path) -> None:
    Path("mine").write_text("my notes")
    assert swerl(*(word.format(out="mine") for word in WRITE["filter"]), "--force").exit_code == 0
    assert len(list(read_tasks(Path("mine")))) == 1


def test_a_second_episode_does_not_replace_the_first(tasks: Path) -> None:
    assert swerl(*(word.format(out="out") for word in WRITE["rollout"])).exit_code == 0
    with pytest.raises(InputError, match="out exists already"):
        swerl(*(word.format(out="out") for word in WRITE["rollout"]))


@pytest.mark.parametrize("command", ["solve-rate", "vet"])
def test_a_command_that_resumes_replaces_only_its_own_file(
    command: str, tasks: Path, some: list[Task]
) -> None:
    write_tasks(Path("other.jsonl"), [replace(some[0], id="another")])
    engine = ("--engine", "scripted:noop") if command == "solve-rate" else ()
    with pytest.raises(InputError, match="this command did not write it"):
        swerl("tasks", command, "tasks.jsonl", *engine, "-o", "other.jsonl")
    assert [task.id for task in read_tasks(Path("other.jsonl"))] == ["another"]
