"""What happens around a run: where a rank is lost, it starts again as often as the recipe says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import EngineError, RankLostError
from swerl.core.events import Event, Notice
from swerl.recipe.schema import Recipe
from swerl.runs.history import History
from swerl.runs.layout import RunFolder
from swerl.runs.status import Presence, Process
from swerl.training import train as training_run


class Starts:
    """Counts how often the run's parts are opened; the first runs end in an error."""

    def __init__(self, errors: list[Exception]) -> None:
        self.count = 0
        self._errors = errors

    @asynccontextmanager
    async def machine(self, *_: Any) -> AsyncIterator[None]:
        self.count += 1
        yield None

    async def run(self, _: Any) -> History:
        if self._errors:
            raise self._errors.pop(0)
        return History()


async def _train(
    errors: list[Exception], restarts: int, root: Path, patch: pytest.MonkeyPatch
) -> tuple[Starts, list[Event]]:
    starts, told = Starts(errors), []
    patch.setattr(training_run, "open_machine", starts.machine)
    patch.setattr(training_run.loop, "run", starts.run)
    recipe = Recipe.model_validate({"name": "r", "trainer": {"restarts": restarts}})
    presence = Presence(root, Process(1, "here", "", 0.0))
    await training_run._despite_deaths(recipe, RunFolder(root), told.append, presence)
    return starts, told


async def test_a_lost_rank_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [RankLostError("rank 1 died"), ExceptionGroup("two", [RankLostError("again")])]
    starts, told = await _train(errors, 2, tmp_path, monkeypatch)
    assert starts.count == 3
    assert [isinstance(event, Notice) for event in told] == [True, True]
    assert "rank 1 died" in str(told[0]) and "restarts left: 1" in str(told[0])


@pytest.mark.parametrize(
    ("error", "restarts"), [(RankLostError("died"), 0), (EngineError("gone"), 5)]
)
async def test_other_errors_and_the_last_one_end_the_run(
    error: Exception, restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)):
        await _train([error], restarts, tmp_path, monkeypatch)
