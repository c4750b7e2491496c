"""Sandboxes for Episodes: how many at once, with what limits, and the harness inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swerl.interfaces import Harness, Limits, Sandbox, SandboxBackend
from swerl.task import Task


class Provisioner:
    """Opens Sandboxes; at most `concurrency` live at once."""

    def __init__(self, backend: SandboxBackend, limits: Limits, *, concurrency: int) -> None:
        self._backend = backend
        self._limits = limits
        self._slots = asyncio.Semaphore(concurrency)

    @asynccontextmanager
    async def for_agent(self, task: Task, harness: Harness) -> AsyncIterator[Sandbox]:
        """Open a Sandbox of the Task's image with the harness installed."""
        async with (
            self._slots,
            self._backend.open(
                task.image, self._limits, workdir=task.workdir, mounts=harness.mounts()
            ) as sandbox,
        ):
            await harness.install(sandbox)
            yield sandbox

    @asynccontextmanager
    async def for_grading(self, task: Task) -> AsyncIterator[Sandbox]:
        """Open a clean Sandbox of the Task's image that no agent ever saw."""
        async with (
            self._slots,
            self._backend.open(task.image, self._limits, workdir=task.workdir) as sandbox,
        ):
            yield sandbox
