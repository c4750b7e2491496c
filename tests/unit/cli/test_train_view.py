"""What `swerl train` prints where its output is no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.cli._train_view import TrainView, show_summary
from swerl.core.events import Notice, Progress, StepEnded
from swerl.recipe.schema import Recipe
from swerl.runs.history import RunHistory


def test_a_stage_is_named_when_it_begins_and_counted_where_it_has_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TrainView(Recipe.model_validate({"name": "shown"})) as view:
        view(Progress("starting trainer and engine", 0, 1))
        view(Progress("evaluating heldout", 0, 12))
        view(Progress("warm start", 10, 10, "loss 1.5"))
        view(Notice("going on after step 3 of 9"))
    assert capsys.readouterr().out.splitlines() == [
        "  starting trainer and engine",
        "  evaluating heldout 0/12",
        "  warm start 10/10 loss 1.5",
        "  going on after step 3 of 9",
    ]


def test_a_step_says_how_long_the_rest_takes(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.model_validate({"name": "shown", "steps": 5})
    metrics = {"reward": 0.5, "sampled_tokens": 10.0, "other_share": 0.1}
    with TrainView(recipe) as view:
        for step, seconds in enumerate((30.0, 90.0, 60.0, 60.0, 60.0)):
            view(StepEnded(step, {**metrics, "step_s": seconds}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("%)  ")[2] for line in lines] == [
        "2 min left", "3 min left", "2 min left", "1 min left", "",
    ]  # fmt: skip


def test_a_summary_has_a_matrix_of_agents_if_there_are_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    past = RunHistory(steps={0: {"solve_rate/a": 0.25}, 1: {"solve_rate/a": 0.75}})
    past.evals = {"heldout/a": [(0, 0.2), (2, 0.6)], "heldout/b": [(0, 0.1), (2, 0.3)]}
    show_summary(Path("runs/mixed"), past)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["solved", "by", "agent", "train", "heldout"] in rows
    assert ["a", *["0.50", "→", "0.50", "0.20", "→", "0.60"]] in rows
    assert ["b", *["held", "out", "0.10", "→", "0.30"]] in rows
    assert "swerl eval compare runs/mixed@heldout-a-0 runs/mixed@heldout-a-2\n" in out


def test_tenths_without_an_episode_have_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {"sampled_tokens_d1": 8.0, "trained_tokens_d1": 4.0, "sampled_tokens_d2": 0.0}
    show_summary(Path("runs/short"), RunHistory(steps={0: tokens}))
    assert f"episodes: 50% {' '.join('-' * 9)}\n" in capsys.readouterr().out
