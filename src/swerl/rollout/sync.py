"""`schedule.mode = "sync"`: rollouts, then the optimizer step, then rollouts again."""

from __future__ import annotations

from swerl.rollout import scheduler
from swerl.rollout.scheduler import StepGroups
from swerl.rollout.supply import Site, Transfer
from swerl.runs.layout import Cursor


class InStep:
    """Implements Supply: every token of a step is sampled by the weights that train on it."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def take(self, step: int) -> StepGroups:
        """Run the Groups of a step."""
        site = self._site
        return await scheduler.run_step(site.tasks, step, site.parts, site.folder)

    async def serve(self, transfer: Transfer) -> None:
        """Load at once: nothing is under way."""
        self._site.versions.add(await transfer())

    async def settle(self) -> None:
        """Do nothing: the newest weights serve."""

    def cursor(self) -> Cursor:
        """Return none: the step says which Tasks come next."""
        return Cursor()
