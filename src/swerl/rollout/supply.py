"""Where the training loop gets the Groups of a step from, by `schedule.mode`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from swerl.core.task import Task
from swerl.recipe.schema import ScheduleSection
from swerl.rollout.gate import Gate
from swerl.rollout.parts import Parts
from swerl.rollout.scheduler import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor, RunFolder

Transfer: TypeAlias = Callable[[], Awaitable[str]]
"""Brings the trainer's weights to the engine and returns the version that serves."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a Supply works with."""

    tasks: Sequence[Task]
    parts: Parts
    folder: RunFolder
    schedule: ScheduleSection
    steps: int
    """Steps of the whole run."""
    versions: Versions
    """What has served; a Supply adds what it loads."""
    gate: Gate | None = None
    """What all requests pass, where replies under way need it when weights change."""


class Supply(Protocol):
    """Brings Groups and weights together in time."""

    async def take(self, step: int) -> StepGroups:
        """Return the Groups that a step is to train; the newest weights serve when it returns."""

    async def serve(self, transfer: Transfer) -> None:
        """Let new weights serve, at once or when the Supply's rule says so."""

    async def settle(self) -> None:
        """Let the newest weights serve before an evaluation, and no others during it."""

    def cursor(self) -> Cursor:
        """Return what must be committed with the step before, so that nothing is lost."""


@asynccontextmanager
async def open_supply(site: Site, cursor: Cursor) -> AsyncIterator[Supply]:
    """Open the Supply of the recipe's mode where a committed step left it.

    Rollouts that fail stop whoever is in the context; leaving it stops the rollouts.
    """
    from swerl.rollout import one_step_off, pool, sync

    if site.schedule.mode == "sync":
        yield sync.InStep(site)
        return
    try:
        async with asyncio.TaskGroup() as running:
            if site.schedule.mode == "async":
                supply: pool.Pool | one_step_off.OneStepOff = pool.Pool(site, running, cursor)
            else:
                supply = one_step_off.OneStepOff(site, running)
            try:
                yield supply
            finally:
                supply.stop()
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a tree of them."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
