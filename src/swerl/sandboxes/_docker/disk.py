"""Ends sandboxes whose files outgrow their limit, where the storage driver has no quota.

The daemon is asked every few seconds, so a fast writer gets past the limit before it is ended.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from swerl.core.errors import SandboxError
from swerl.sandboxes._docker.api import Api
from swerl.sandboxes._docker.container import NAME
from swerl.sandboxes._docker.machine import Machine

PERIOD_S = 10.0


class DiskWatch:
    """Looks after the open sandboxes of one backend."""

    def __init__(self, api: Api, period_s: float = PERIOD_S) -> None:
        self._api = api
        self._period_s = period_s
        self._machines: dict[str, Machine] = {}
        self._watching: asyncio.Task[None] | None = None

    def add(self, machine: Machine) -> None:
        """Look after a sandbox from here on."""
        self._machines[machine.container] = machine
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    def drop(self, machine: Machine) -> None:
        """Look after it no more."""
        self._machines.pop(machine.container, None)
        if not self._machines and self._watching:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            with suppress(SandboxError):  # a daemon that is away is noticed elsewhere
                await self._look()

    async def _look(self) -> None:
        entries = await self._api.call(
            lambda client: client.containers(size=True, filters={"label": NAME})
        )
        for entry in entries:
            machine = self._machines.get(entry["Id"])
            if machine and entry.get("SizeRw", 0) > machine.plan.limits.disk_mib << 20:
                reason = f"its files outgrew disk_mib = {machine.plan.limits.disk_mib}"
                await machine.close(reason, from_inside=True)
