"""The order of the loop, with parts that only wait; `tests/test_train.py` runs the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swerl.core.events import Event
from swerl.core.learning import CheckpointRef
from swerl.recipe.schema import Recipe
from swerl.rollout.schedules import Schedule
from swerl.runs.layout import State, open_run
from swerl.training import loop
from swerl.training.updates import Learned


class Trainer:
    """Writes checkpoints slowly."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def save(self, step: int, *, kept: Any = ()) -> None:
        self.steps.append(step)

    async def saved(self) -> CheckpointRef:
        await asyncio.sleep(0.05)
        return CheckpointRef(self.steps[-1], 1, 0.1, "")


class Waits:
    """Stands for the parts that take no part in the order."""

    async def take(self, step: int) -> Any:
        return SimpleNamespace(kept=())

    async def serve(self, transfer: object) -> None: ...

    def cursor(self) -> None: ...

    def close(self, *_: object) -> dict[str, float]:
        return {}

    def state(self, step: int, _: object) -> State:
        return State(step=step, versions=tuple(map(str, range(step + 1))))


async def test_what_is_evaluated_is_committed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash could leave an evaluation, and a best step, of weights that are gone."""
    recipe = Recipe.model_validate({"name": "r", "steps": 4, "eval": {"every": 2}})
    seen: list[tuple[int, int]] = []
    told: list[Event] = []

    @asynccontextmanager
    async def schedule(*_: object) -> AsyncIterator[Schedule]:
        yield Waits()  # type: ignore[misc]  # what the loop calls of a Schedule

    async def books(_: object) -> Any:
        return SimpleNamespace(versions=None, close=Waits().close, state=Waits().state)

    async def learned(*_: object) -> Learned:
        return Learned(None)

    with open_run(tmp_path / "run", {}) as folder:

        async def evaluate(_: object, __: object, step: int) -> None:
            seen.append((step, folder.read_state().step))

        for name, fake in {
            "open_schedule": schedule, "_resume": books, "_learn": learned, "_evaluate": evaluate,
            "_schedule_inputs": lambda *_: None,
            "collect": lambda *_: None, "_stored": lambda *_: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(loop, name, fake)
        parts = SimpleNamespace(emit=told.append)
        await loop.run(
            loop.Machine(
                recipe=recipe,
                folder=folder,
                train=(),
                evals={},
                engine=None,  # type: ignore[arg-type]
                trainer=Trainer(),  # type: ignore[arg-type]
                algorithm=None,  # type: ignore[arg-type]
                parts=parts,  # type: ignore[arg-type]
                meter=loop.Meter(None),  # type: ignore[arg-type]
            )
        )
    assert seen == [(0, 0), (2, 2), (4, 4)]
