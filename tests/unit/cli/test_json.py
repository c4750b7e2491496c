"""Every command that reports prints JSON on request, and nothing else on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app, whole_command
from swerl.core.task import Task, write_tasks
from swerl.tasks import twin

NO_REPORT = {
    **dict.fromkeys(
        (
            *("train resume", "train stop", "train rewind", "agents fetch"),
            "tasks from-repo",
            *(f"images {name}" for name in ("build", "bake", "mirror", "gc", "prepare")),
        ),
        "acts; another command reports the state",
    ),
    "sandbox serve": "serves until Ctrl-C; its lines are for a shell's eval",
    "view": "shows pages in a browser",
}
"""Command -> why it has no result to report."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the name and the command of everything that can be run."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(whole_command()))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_reports_has_json(name: str) -> None:
    options = {word: parameter for parameter in COMMANDS[name].params for word in parameter.opts}
    if name in NO_REPORT:
        assert "--json" not in options
    else:
        assert options["--json"].help.startswith("Print JSON on stdout")


def test_the_exceptions_are_commands() -> None:
    assert NO_REPORT.keys() <= COMMANDS.keys()


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("twin")
    return twin.make_tasks(folder, split="heldout", count=3, seed=0)


@pytest.fixture
def place(some: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path / "tasks.jsonl", some)
    return tmp_path


def swerl(words: str) -> Result:
    return CliRunner().invoke(typer_app, words.split(), catch_exceptions=False)


SHOWN = {
    "convert list": {"name", "source", "splits"},
    "cost estimate twin_cpu": {"assumptions", "cases"},
    "images ls": {"store", "images"},
    "images pull host": {"images", "failed", "moved_bytes", "store"},
    "recipes": {"name", "gpus", "about", "file"},
    "convert tasks.jsonl --format verl-parquet -o s.parquet": {
        "file",
        "num_tasks",
        "left_out",
    },
    "tasks filter tasks.jsonl --sample 1 -o f.jsonl": {"file", "num_tasks", "num_all"},
    "tasks show tasks.jsonl": {"num_tasks", "numbers", "groups", "tasks"},
    "train status": None,
    "train twin_cpu --dry-run": {"recipe", "model", "disk", "obstacles", "simulation"},
}
"""Command line -> keys of its JSON, or of the JSON's first row; None if it has no rows here."""


@pytest.mark.parametrize("line", SHOWN)
def test_stdout_is_json_with_these_keys(line: str, place: Path) -> None:
    done = swerl(f"{line} --json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    first = found[0] if isinstance(found, list) and found else found
    assert first == [] if SHOWN[line] is None else SHOWN[line] <= first.keys()


def test_a_recipe_is_described_by_its_whole_first_sentence(place: Path) -> None:
    about = {row["name"]: row["about"] for row in json.loads(swerl("recipes --json").stdout)}
    assert about["sft_twin"].endswith("by cross-entropy of the sampled tokens")


def test_a_shown_task_keeps_its_solution_to_itself(place: Path, some: list[Task]) -> None:
    line = f"tasks show tasks.jsonl {some[0].id} --json"
    assert "solution" not in json.loads(swerl(line).stdout)
    assert json.loads(swerl(f"{line} --hidden").stdout)["solution"] == some[0].gold_patch


def test_a_conversion_prints_its_counts_and_files(place: Path) -> None:
    files = {"instruction.md": "Mend it.", "tests/test.sh": "true\n"}
    files["task.toml"] = '[environment]\ndocker_image = "a/b:1"\n'
    for name, text in files.items():
        (Path("folders/one") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("folders/one") / name).write_text(text)
    found = json.loads(swerl("convert harbor --rows folders -o again.jsonl --json").stdout)
    assert (found["num_tasks"], found["num_rejects"]) == (1, 0)
    assert found["tasks"] == "again.jsonl"
    assert found["rejects"] is None


def test_an_error_leaves_stdout_empty(place: Path) -> None:
    done = CliRunner().invoke(typer_app, ["tasks", "show", "none.jsonl", "--json"])
    assert done.exit_code != 0
    assert done.stdout == ""
