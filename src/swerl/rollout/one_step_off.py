"""`schedule.mode = "one-step-off"`: the next step's rollouts run while the trainer learns.

The rollouts of step k + 1 begin when step k is trained, with the weights that step k begins with.
New weights wait until those rollouts are over. So every token is one version old, no Episode sees
two versions, and what a step trains does not depend on how long anything took.
"""

from __future__ import annotations

import asyncio

from swerl.rollout import scheduler
from swerl.rollout.scheduler import StepGroups
from swerl.rollout.supply import Site, Transfer
from swerl.runs.layout import Cursor


class OneStepOff:
    """Implements Supply."""

    def __init__(self, site: Site, running: asyncio.TaskGroup) -> None:
        self._site = site
        self._running = running
        self._ahead: asyncio.Task[StepGroups] | None = None
        """Rollouts of the next step."""
        self._transfer: Transfer | None = None
        """Brings weights that do not serve yet."""

    async def take(self, step: int) -> StepGroups:
        """Return the Groups that were rolled out ahead, and begin those of the next step."""
        groups = await (self._ahead or self._begin(step))
        self._ahead = None
        await self.settle()
        if step + 1 < self._site.steps:
            self._ahead = self._begin(step + 1)
        return groups

    async def serve(self, transfer: Transfer) -> None:
        """Load once the rollouts under way are over."""
        self._transfer = transfer
        if self._ahead is None:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the rollouts under way, then load what waits."""
        if self._ahead:
            await asyncio.wait({self._ahead})
        if self._transfer:
            self._site.versions.add(await self._transfer())
            self._transfer = None

    def cursor(self) -> Cursor:
        """Return none: the step says which Tasks come next."""
        return Cursor()

    def stop(self) -> None:
        """Give up what is under way."""
        if self._ahead:
            self._ahead.cancel()

    def _begin(self, step: int) -> asyncio.Task[StepGroups]:
        site = self._site
        work = scheduler.run_step(site.tasks, step, site.parts, site.folder)
        return self._running.create_task(work)
