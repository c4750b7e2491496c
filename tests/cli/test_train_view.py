"""What `swerl train` prints where its output is no terminal."""

from __future__ import annotations

import pytest

from swerl.cli._train_view import TrainView
from swerl.core.events import Notice, Progress
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
