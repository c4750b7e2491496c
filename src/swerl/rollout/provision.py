"""Sandboxes for Episodes: how many Episodes at once, with what limits, the harness inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swerl.core.contracts import Harness, Sandbox, SandboxBackend
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.rollout.clock import Clock
from swerl.tasks.hide_future import Facts, scrub
from swerl.tasks.set_up import set_up


class Provisioner:
    """Opens Sandboxes. An Episode holds one at a time, so `concurrency` slots bound them."""

    def __init__(self, backend: SandboxBackend, limits: Limits, *, concurrency: int) -> None:
        self._backend = backend
        self._limits = limits
        self._facts: dict[str, Facts] = {}
        self.slot = asyncio.Semaphore(concurrency)
        """Held by an Episode from its start to its end, before any of its budgets runs."""

    @asynccontextmanager
    async def for_agent(self, task: Task, harness: Harness, clock: Clock) -> AsyncIterator[Sandbox]:
        """Open a Sandbox of the Task's image, without a future and with the harness installed.

        The clock hears of the phase `scrub`. Raises BrokenImageError on a broken repository.
        """
        async with self._backend.open(
            task.image, self._limits, workdir=task.workdir, mounts=harness.mounts()
        ) as sandbox:
            with clock.phase("scrub"):
                await set_up(sandbox, task)
                scrubbed = await scrub(sandbox, task, facts=self._facts.get(task.id))
            self._facts[task.id] = scrubbed.facts
            await harness.install(sandbox)
            yield sandbox

    @asynccontextmanager
    async def for_grading(self, task: Task) -> AsyncIterator[Sandbox]:
        """Open a clean Sandbox of the Task's image that no agent ever saw."""
        async with self._backend.open(task.image, self._limits, workdir=task.workdir) as sandbox:
            await set_up(sandbox, task)
            yield sandbox
