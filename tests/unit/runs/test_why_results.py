"""`swerl why` on results that no step trains: of `eval`, `solve-rate`, `rollout` and `serve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.chat import Finish
from swerl.core.episode import Episode
from swerl.core.errors import RunError
from swerl.core.files import write_json
from swerl.core.grade import TestStatus, Verdict
from swerl.rollout import record
from swerl.runs import why
from tests.unit.runs._why_records import ATTEMPTS, RECIPE, healthy_episode, make_run

DIGEST = "0f" * 32


def evaluated(
    root: Path, change: Callable[[Episode], Episode] = lambda each: each, *, tasks: int = 4
) -> Path:
    """Write the attempts of `swerl eval`: a stage for each Task, and no events."""
    root.mkdir(parents=True)
    write_json(root / "recipe.resolved.json", RECIPE)
    for task in range(tasks):
        for attempt in range(ATTEMPTS):
            episode = change(healthy_episode(0, task, attempt))
            record.write(root / "episodes" / f"{task}{DIGEST}" / episode.id[6:], episode)
    return root


def with_verdict(episode: Episode, verdict: Verdict, reason: str = "") -> Episode:
    return replace(episode, grade=replace(episode.grade, verdict=verdict, reason=reason))


def test_a_healthy_evaluation_is_described_by_its_verdicts(tmp_path: Path) -> None:
    def failed(episode: Episode) -> Episode:
        solved = episode.grade.verdict is Verdict.SOLVED
        return episode if solved else with_verdict(episode, Verdict.UNSOLVED, "test_new failed")

    root = evaluated(tmp_path / "eval", failed)
    found = why.diagnose(root)
    told = "16 Episodes (8 solved, 8 unsolved; most often: test_new failed)"
    assert list(found.lines()) == [f"no fault found in the records of {told}"]
    assert found.steps == ()
    (root / "episodes" / f"0{DIGEST}" / "task-0-0.0" / "episode.json").unlink()
    assert "15 Episodes" in why.diagnose(root).read  # one is still under way


def test_a_fault_of_an_evaluation_is_named(tmp_path: Path) -> None:
    def without(episode: Episode) -> Episode:
        return replace(episode, log="bash: git: command not found")

    assert why.diagnose(evaluated(tmp_path / "a", without)).findings[0].cause == "infrastructure"

    def unread(episode: Episode) -> Episode:
        turns = (replace(episode.trajectory.turns[0], finish=Finish.STOP),)
        return replace(episode, trajectory=replace(episode.trajectory, turns=turns))

    root = evaluated(tmp_path / "b", unread)
    (make_run(tmp_path / "run", steps=1) / "initial_model").rename(root / "initial_model")
    found = why.diagnose(root).findings[0]
    assert found.cause == "wrong-parser"
    assert "step" not in CliRunner().invoke(typer_app, ["why", str(root)]).output


@pytest.mark.parametrize("verdict", [Verdict.SOLVED, Verdict.TIMEOUT])
def test_equal_and_easy_attempts_are_no_fault_where_nothing_trains(
    tmp_path: Path, verdict: Verdict
) -> None:
    def same(episode: Episode) -> Episode:
        first = healthy_episode(0, 0, 0).trajectory
        turns = tuple(replace(each, logprobs=(0.0,) * len(each.logprobs)) for each in first.turns)
        passed = dict.fromkeys(episode.grade.tests, TestStatus.PASSED)
        grade = replace(episode.grade, verdict=verdict, tests=passed)
        return replace(episode, grade=grade, trajectory=replace(first, turns=turns))

    causes = [each.cause for each in why.diagnose(evaluated(tmp_path / "eval", same)).findings]
    late = ["budget-too-small", "no-signal"]
    assert causes == ([] if verdict is Verdict.SOLVED else late)


def test_episodes_of_rollouts_and_sessions_have_a_line(tmp_path: Path) -> None:
    episode = with_verdict(healthy_episode(0, 0, 1), Verdict.UNSOLVED, "1 of 2 tests failed")
    record.write(tmp_path / "rollouts" / "a" / "one", episode)
    found = why.diagnose(tmp_path / "rollouts" / "a" / "one")
    assert found.read == "1 Episode (1 unsolved; most often: 1 of 2 tests failed)"
    wordy = with_verdict(healthy_episode(0, 0, 2), Verdict.UNSOLVED, "x" * 201)
    record.write(tmp_path / "rollouts" / "a" / "wordy", wordy)
    read = why.diagnose(tmp_path / "rollouts" / "a" / "wordy").read
    assert read == f"1 Episode (1 unsolved; most often: {'x' * 199}…)"
    for number in range(3):
        folder = tmp_path / "serve" / "0" / str(number)
        folder.mkdir(parents=True)
        record.write_trajectory(folder, healthy_episode(0, 0, number).trajectory)
    assert why.diagnose(tmp_path / "serve" / "0").read == "3 Episodes (3 not graded)"
    (folder / "trajectory.json").write_text('{"turns": [')
    damaged = why.diagnose(tmp_path / "serve" / "0")
    assert not damaged.findings
    assert any("trajectory.json" in problem for problem in damaged.problems)
    with pytest.raises(RunError):
        why.diagnose(tmp_path / "nothing")


def test_the_newest_result_of_any_command_is_read(tmp_path: Path) -> None:
    evaluated(tmp_path / "runs" / "eval")
    done = CliRunner().invoke(typer_app, ["why", "--runs", str(tmp_path / "runs")])
    assert (done.exit_code, done.output[:6]) == (0, "eval: ")
    record.write(tmp_path / "out" / "a.0", healthy_episode(0, 0, 0))
    done = CliRunner().invoke(typer_app, ["why", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "1 Episode (1 solved)" in done.output
