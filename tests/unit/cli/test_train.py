"""`swerl train` and the commands beside it, as a user types them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.errors import InputError, RecipeError, RunError, UnknownNameError
from swerl.core.events import EpisodeEnded, PhaseStarted, StepEnded, StepStarted, as_json
from swerl.core.files import write_json
from swerl.plan.cost import price_book
from swerl.recipe.schema import Recipe
from swerl.runs.history import TAIL_BYTES
from swerl.runs.layout import RunFolder, RunState, open_run
from swerl.runs.status import StopRequest, own_run, request_stop

RECIPE = Recipe.model_validate({"name": "shown", "steps": 9})
SMALL = """
name = "small"
steps = 50
[tasks]
num_train = 4
num_heldout = 0
num_unseen = 0
[trainer]
ranks = 1
[model]
warm_start_steps = 2
[rollout]
groups_per_step = 1
episodes_per_group = 2
max_new_tokens = 24
max_turns = 2
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def swerl(*arguments: str) -> Result:
    return CliRunner().invoke(typer_app, ["train", *arguments], catch_exceptions=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run folder as a run leaves it in its fourth step."""
    folder = RunFolder(tmp_path / "shown")
    folder.root.mkdir()
    write_json(folder.root / "recipe.resolved.json", RECIPE.model_dump(mode="json"))
    folder.write_state(RunState(step=3))
    events = [
        StepEnded(2, {"reward": 0.25, "step_s": 60.0}),
        StepStarted(3, 8),
        PhaseStarted("a", "agent"),
        EpisodeEnded("b", "t", "solved", 1.0, 3, 100, 5.0),
    ]
    lines = [json.dumps(as_json(event)) for event in events]
    folder.events.write_text("\n".join(lines) + '\n{"event": "cut sh')
    return folder.root


def test_a_recipe_in_place_of_a_command_is_run(tmp_path: Path) -> None:
    done = swerl("recipes/twin_cpu.toml", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "twin" in done.output


def test_status_reads_the_folder_alone(root: Path) -> None:
    done = swerl("status", "shown", "--runs", str(root.parent))
    assert done.exit_code == 0, done.output
    after = f"swerl train resume {root}"
    for text in ("shown: new", "3 of 9 committed", "reward 0.25", after):
        assert text in done.output
    facts = json.loads(swerl("status", str(root), "--json").output)
    assert facts["episodes"] == [1, 8]
    assert facts["phases"] == {"agent": 1}


def test_the_cost_of_gpus_is_that_of_every_step(root: Path) -> None:
    gpus = {"name": "shown", "steps": 9, "cluster": {"nodes": 2, "gpus_per_node": 8}}
    write_json(root / "recipe.resolved.json", Recipe.model_validate(gpus).model_dump(mode="json"))
    steps = [f"{json.dumps(as_json(StepEnded(n, {'step_s': 1800.0})))}\n" for n in range(2)]
    between = f"{json.dumps(as_json(PhaseStarted('a', 'agent')))}\n" * 100_000
    assert len(between) > TAIL_BYTES
    RunFolder(root).events.write_text(between.join(steps))
    facts = json.loads(swerl("status", str(root), "--json").output)
    assert facts["dollars"]["gpus"] == 16 * price_book({})["h100_hour"].value


def test_status_names_a_lost_run_and_what_it_was_asked(root: Path) -> None:
    with open_run(root, RECIPE.model_dump(mode="json")):
        asyncio.run(_die(root))
        request_stop(root, StopRequest.STEP)
        assert "asked      to end after the step under way" in swerl("status", str(root)).output
    assert "shown: lost: no process is seen here" in swerl("status", str(root)).output


async def _die(root: Path) -> None:
    """Leave what a process leaves that is killed."""
    async with own_run(root):
        left = (root / "process.json").read_bytes()
    (root / "process.json").write_bytes(left)


def test_a_run_in_the_usual_place_is_called_by_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.parent.joinpath("runs").mkdir()
    root.rename(root.parent / "runs" / "shown")
    monkeypatch.chdir(root.parent)
    assert "swerl train resume shown\n" in swerl("status", "shown").output


def test_a_run_with_a_login_in_a_url_resumes_by_its_own_command(root: Path) -> None:
    recipe = RECIPE.model_dump(mode="json")
    recipe["engine"] = {"type": "openai", "base_url": "http://me:hidden@host/v1", "model": "m"}
    shutil.rmtree(root)
    with open_run(root, recipe):
        pass
    with pytest.raises(InputError, match="a URL with a login") as caught:
        swerl("resume", str(root))
    assert "the command that started the run" in caught.value.hint


def test_a_mistyped_command_gets_a_hint_to_the_commands() -> None:
    with pytest.raises(RecipeError, match="cannot read recipe statsu") as caught:
        swerl("statsu")
    assert "`swerl train --help` the commands" in caught.value.hint


def test_a_recipe_of_swerl_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = swerl("twin_cpu", "--dry-run")
    assert done.exit_code == 0
    assert "Plan of twin" in done.output


def test_a_run_that_cannot_be_read_hides_no_other(root: Path) -> None:
    broken = root.parent / "broken"
    broken.mkdir()
    (broken / "recipe.resolved.json").write_text("{")
    done = swerl("status", "--runs", str(root.parent))
    assert done.exit_code == 0
    assert "3/9" in done.output
    assert "broken cannot be read" in done.output
    rows = json.loads(swerl("status", "--runs", str(root.parent), "--json").output)
    assert {row["run"]: row["standing"] for row in rows}["broken"] == "unreadable"


def test_an_evaluation_is_not_called_an_untouched_run(root: Path) -> None:
    evaluated = root.parent / "eval-a"
    (evaluated / "episodes" / "0f" / "task.0").mkdir(parents=True)
    write_json(evaluated / "recipe.resolved.json", RECIPE.model_dump(mode="json"))
    [line] = [
        each
        for each in swerl("status", "--runs", str(root.parent)).output.splitlines()
        if each.startswith(" eval-a")
    ]
    assert "evaluated" in line and "0/" not in line
    one = swerl("status", "eval-a", "--runs", str(root.parent)).output
    assert "resume" not in one and "swerl view" in one


def test_status_lists_all_runs_and_says_where_there_are_none(root: Path, tmp_path: Path) -> None:
    assert "3/9" in swerl("status", "--runs", str(root.parent)).output
    empty = swerl("status", "--runs", str(tmp_path / "none"))
    assert empty.exit_code == 0
    assert "no runs" in empty.output


def test_an_unknown_run_names_the_nearest(root: Path) -> None:
    with pytest.raises(UnknownNameError) as error:
        swerl("status", "shwn", "--runs", str(root.parent))
    assert "shown" in error.value.hint


def test_a_run_that_may_not_be_looked_at_is_one_error(root: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read .*File name too long"):
        swerl("status", "x" * 300, "--runs", str(root.parent))


def test_what_does_not_run_cannot_be_stopped(root: Path) -> None:
    with pytest.raises(RunError, match="not running: new") as error:
        swerl("stop", str(root))
    assert "swerl train resume" in error.value.hint
    assert not (root / "stop.json").exists()


def test_a_recipe_of_another_version_is_not_resumed(root: Path) -> None:
    write_json(root / "recipe.resolved.json", {"name": "shown", "strange": 1})
    with pytest.raises(RunError, match="strange"):
        swerl("resume", str(root))


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "swerl", "train", *arguments, "--runs", str(folder / "runs")],
        env={**os.environ, "SWERL_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 500
    while not reached():
        if process.poll() is not None:
            pytest.fail(f"it ended early: {process.communicate()[0]}")
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.integration
def test_a_run_is_looked_at_stopped_and_taken_up_again(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    (tmp_path / "small.toml").write_text(SMALL)
    root = tmp_path / "runs" / "small"
    folder = RunFolder(root)

    started = _start(tmp_path, str(tmp_path / "small.toml"))
    _until(lambda: folder.read_state().step >= 1, started)
    shown = swerl("status", str(root)).output
    assert "running" in shown and "trainer-rank0" in shown
    assert swerl("stop", str(root)).exit_code == 0
    output, _ = started.communicate(timeout=500)
    assert started.returncode == 0 and "stopped after step" in output, output
    assert "stopped" in swerl("status", str(root)).output

    # One that is done starts nothing again, and shows what it came to.
    folder.write_state(replace(folder.read_state(), finished=True))
    resumed = swerl("resume", str(root))
    assert resumed.exit_code == 0
    assert "reward by step" in resumed.output
