"""One step off: rollouts during the optimizer step, and the weights that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from swerl.recipe.schema import ScheduleSection
from swerl.rollout import step
from swerl.rollout.schedules import Schedule, ScheduleInputs, open_schedule
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor


@dataclass
class Engine:
    """Which weights serve, and what the rollouts of each step began and ended with."""

    serving: str = "v0"
    began: dict[int, str] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def run_step(self, tasks, step, parts, folder) -> StepGroups:
        """A fake of `step.run_step`: it ends when the test says so."""
        self.began[step] = self.serving
        await self.may_end.wait()
        self.ended[step] = self.serving
        return StepGroups(())

    def transfer(self, version: str) -> Callable[[], Any]:
        async def run() -> str:
            self.serving = version
            return version

        return run


@asynccontextmanager
async def opened(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Schedule]:
    monkeypatch.setattr(step, "run_step", engine.run_step)
    absent: Any = None
    site = ScheduleInputs(
        tasks=(),
        parts=absent,
        folder=absent,
        section=ScheduleSection(mode="one-step-off"),
        steps=3,
        versions=Versions(["v0"]),
    )
    async with asyncio.timeout(30), open_schedule(site, Cursor()) as schedule:
        yield schedule


async def test_each_step_trains_what_the_weights_before_the_last_step_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.may_end.set()
    async with opened(engine, monkeypatch) as schedule:
        for step in range(3):
            await schedule.take(step)
            assert engine.serving == f"v{step}"  # the trainer's own, whatever was sampled
            await asyncio.sleep(0)
            await schedule.serve(engine.transfer(f"v{step + 1}"))
        await schedule.settle()
    assert engine.began == engine.ended == {0: "v0", 1: "v0", 2: "v1"}
    assert engine.serving == "v3"


async def test_new_weights_wait_for_the_rollouts_under_way(monkeypatch) -> None:
    engine = Engine()
    engine.may_end.set()
    async with opened(engine, monkeypatch) as schedule:
        await schedule.take(0)
        engine.may_end.clear()
        await asyncio.sleep(0)
        await schedule.serve(engine.transfer("v1"))
        assert engine.serving == "v0"
        settling = asyncio.create_task(schedule.settle())
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.serving == "v0"
        engine.may_end.set()
        await settling
        assert (engine.ended[1], engine.serving) == ("v0", "v1")


async def test_an_interrupted_step_gives_up_the_rollouts_ahead(monkeypatch) -> None:
    engine = Engine()
    engine.may_end.set()
    with pytest.raises(ValueError, match="the trainer failed"):
        async with opened(engine, monkeypatch) as schedule:
            await schedule.take(0)
            engine.may_end.clear()
            await asyncio.sleep(0)
            message = "the trainer failed"
            raise ValueError(message)
    assert engine.began.keys() - engine.ended.keys() == {1}
