"""After a lost rank a run restarts, as often as the recipe allows; its initial model is copied."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import EngineError, InputError, RankLostError, RunError
from swerl.core.events import Event, Notice, ignore
from swerl.engines.families import tiny
from swerl.recipe.schema import Recipe
from swerl.runs.history import RunHistory
from swerl.runs.layout import RunFolder
from swerl.runs.status import RunOwner, RunProcess
from swerl.training import train
from swerl.training.train import check_trainable


class Starts:
    """Counts how often the run's parts are opened; the first runs end in an error."""

    def __init__(self, errors: list[Exception]) -> None:
        self.count = 0
        self._errors = errors

    @asynccontextmanager
    async def training(self, *_: Any) -> AsyncIterator[None]:
        self.count += 1
        yield None

    async def run(self, _: Any) -> RunHistory:
        if self._errors:
            raise self._errors.pop(0)
        return RunHistory()


async def _train(
    errors: list[Exception], restarts: int, root: Path, patch: pytest.MonkeyPatch
) -> tuple[Starts, list[Event]]:
    starts, events = Starts(errors), []
    patch.setattr(train, "open_training", starts.training)
    patch.setattr(train.loop, "run", starts.run)
    recipe = Recipe.model_validate({"name": "r", "trainer": {"restarts": restarts}})
    owner = RunOwner(root, RunProcess(1, "here", "", 0.0))
    await train._train_with_restarts(recipe, RunFolder(root), events.append, owner)
    return starts, events


async def test_a_run_restarts_after_a_lost_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [RankLostError("rank 1 died"), ExceptionGroup("two", [RankLostError("again")])]
    starts, events = await _train(errors, 2, tmp_path, monkeypatch)
    assert starts.count == 3
    assert [isinstance(event, Notice) for event in events] == [True, True]
    assert "rank 1 died" in str(events[0]) and "restarts left: 1" in str(events[0])


@pytest.mark.parametrize(
    ("error", "restarts"), [(RankLostError("died"), 0), (EngineError("gone"), 5)]
)
async def test_other_errors_and_the_last_one_end_the_run(
    error: Exception, restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)):
        await _train([error], restarts, tmp_path, monkeypatch)


async def test_a_copy_that_a_full_disk_cut_short_is_one_error_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, root = tmp_path / "cache", tmp_path / "run"
    for folder in (cache, root):
        folder.mkdir()
    (cache / "config.json").write_text("{}")
    recipe = Recipe.model_validate({"name": "r"})

    async def made(*_: Any, **__: Any) -> Path:
        return cache

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train, "warm_start", made)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left") as error:
        patch.setattr(train.shutil, "copy2", full)
        await train.initial_model(recipe, RunFolder(root), tmp_path, ignore)
    assert "free some disk space" in error.value.hint
    model = await train.initial_model(recipe, RunFolder(root), tmp_path, ignore)
    assert (model / "config.json").read_text() == "{}"


def test_a_model_of_an_unknown_line_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    family = tiny.build(tiny_model)
    check_trainable(family, tiny_model)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    with pytest.raises(InputError, match="'gpt_oss' can be run but not trained") as raised:
        check_trainable(family, tmp_path)
    assert "qwen3_5_moe" in raised.value.hint
