"""A reward over recorded Episodes beside the recorded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.contracts import Attempt
from swerl.core.episode import Episode, Status
from swerl.core.errors import InputError, PluginError
from swerl.core.files import write_json
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.recipe.schema import Recipe, RolloutSection
from swerl.rollout import record, rescore
from swerl.runs.index import FoundRun
from tests.unit import made

PENALTIES = rescore.penalties({"rollout": {"shaping": {"unfinished": 0.5}, "gone": 1}})


def _task(name: str) -> Task:
    return Task(name, "e/r", "dir:/x", "/r", "Fix.", GradingSpec("swebench", fail_to_pass=("t",)))


def _episode(
    name: str, reward: float, length: int, verdict: str = "unsolved", **fields: Any
) -> Episode:
    turn = made.turn(output=(2,) * length)
    return made.episode(
        name, turn, verdict="solved" if reward == 1 else verdict, reward=reward, **fields
    )


def _run(root: Path, *episodes: Episode) -> FoundRun:
    recipe = Recipe.model_validate({"name": "a", "tasks": {"source": str(root / "gone.jsonl")}})
    root.mkdir(exist_ok=True)
    write_json(root / "recipe.resolved.json", recipe.model_dump(mode="json"))
    (root / "events.jsonl").touch()
    for episode in episodes:
        record.write(root / "episodes" / "00000" / episode.id, episode)
    return FoundRun(root.name, root, is_trained=True)


def _short(attempt: Attempt) -> float:
    """Reward brevity, whatever the verdict."""
    return 1 - attempt.trajectory.num_sampled_tokens / 100


def test_signal_length_bias_and_reversed_groups_are_counted(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "run",
        *(_episode("a.0", 1, 90), _episode("a.1", 0, 10)),  # the solved one is the longer one
        *(_episode("b.0", 0, 20), _episode("b.1", 0, 40)),  # the recorded rewards are equal
        *(_episode("c.0", 1, 30), _episode("c.1", 1, 30)),
        _episode("c.2", 0, 30, "infra"),
    )
    found = rescore.rescore(run, _short, _task, PENALTIES)
    assert found.num_groups == 3 and len(found.episodes) == 6
    assert found.left_out == {"infra, which is never trained": 1}
    assert found.recorded.mean == 0.5 and found.recorded.num_values == 2
    assert found.recorded.groups_with_signal == 1 and found.rewarded.groups_with_signal == 2
    assert found.rewarded.length_bias < -0.9 < 0 < found.recorded.length_bias
    assert found.reversed_groups == ("00000 a",)
    first = found.most_changed(1)[0]
    assert first.folder.name == "a.0" or first.reward == pytest.approx(0.9)
    assert {one.folder.name for one in found.most_changed(10)} == {
        one.folder.name for one in found.episodes
    }


def test_evaluations_of_a_training_run_and_damaged_episodes_are_left_out(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _episode("a.0", 1, 10), _episode("a.1", 0, 10))
    record.write(run.root / "episodes" / "eval-heldout-00000" / "z.0", _episode("z.0", 1, 5))
    (run.root / "episodes" / "00000" / "a.1" / "grade.json").write_text("{")
    found = rescore.rescore(run, _short, _task, PENALTIES)
    assert [one.folder.name for one in found.episodes] == ["a.0"]
    assert found.left_out == {"unfinished or damaged": 1}


def test_the_penalties_of_the_run_are_subtracted(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _episode("a.0", -0.5, 10, status=Status.LIMIT))
    [one] = rescore.rescore(run, lambda attempt: 0.0, _task, PENALTIES).episodes
    assert one.reward == -0.5


def test_a_folder_without_rewardable_episodes_is_an_error(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _episode("a.0", 1, 10))
    with pytest.raises(InputError, match="1 of an unknown Task") as error:
        rescore.rescore(run, _short, lambda name: None, RolloutSection())
    assert "--tasks" in error.value.hint


def test_the_command_reads_the_tasks_of_the_run_and_names_a_failing_line(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _episode("a.0", 1, 90), _episode("a.1", 0, 10))
    function = tmp_path / "mine.py"
    function.write_text(
        "def reward(attempt):\n    return len(attempt.task.prompt)\n\n\n"
        "def broken(attempt):\n    return attempt.task.nothing\n"
    )
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [_task("a")])
    with pytest.raises(InputError, match="not there") as missing:
        swerl("reward", str(function), str(run.root))
    assert "--tasks FILE" in missing.value.hint
    given = ("--tasks", str(tasks))
    shown = swerl("reward", str(function), str(run.root), *given, "--json")
    assert json.loads(shown.stdout)["rewarded"]["mean"] == len("Fix.")
    text = swerl("reward", str(function), str(run.root), *given).stdout
    assert "2 Episodes in 1 Group" in text and "next: swerl view" in text
    with pytest.raises(PluginError, match=f"REWARD FAILED {function}:6"):
        swerl("reward", f"{function}:broken", str(run.root), *given)


def swerl(*words: str) -> Result:
    return CliRunner().invoke(typer_app, words, catch_exceptions=False)
