"""What `swerl train` prints where its output is no terminal."""

from __future__ import annotations

import pytest

from swerl.cli._train_view import TrainView
from swerl.core.events import Notice, Progress, StepEnded
from swerl.recipe.schema import Recipe


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
