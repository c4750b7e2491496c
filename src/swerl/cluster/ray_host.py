"""The Ray actor of one machine: it holds the machine's share and starts processes there.

Its processes are its children and end with it; it ends with the run's controller.
"""

# heavy imports: this file only runs in Ray's own processes

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from swerl.cluster.node import LocalNode, LocalProcess, ProcessEnd, ProcessSpec
from swerl.core.errors import SwerlError


@dataclass(frozen=True, slots=True)
class RemoteError:
    """A SwerlError as a value: exceptions lose their fields on the way through Ray."""

    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Name, address and GPUs of a machine."""

    name: str
    address: str
    gpus: tuple[str, ...]


class RayHost:
    """One machine's actor; every method runs in its one event loop."""

    def __init__(self) -> None:
        self._node = LocalNode()
        self._running: dict[int, LocalProcess] = {}

    async def info(self) -> HostInfo:
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return HostInfo(platform.node(), ray.util.get_node_ip_address(), gpus)

    async def start(self, spec: ProcessSpec) -> int | RemoteError:
        try:
            process = await self._node.start(spec)
        except SwerlError as error:
            return RemoteError(str(error), error.hint)
        self._running[process.pid] = process
        return process.pid

    async def ended(self, pid: int) -> ProcessEnd:
        # A caller that is cancelled must not cancel the task for the others.
        return await asyncio.shield(self._running[pid].ended)

    async def signal(self, pid: int, number: int) -> None:
        await self._running[pid].signal(number)

    async def send(self, pid: int, line: bytes) -> bool:
        """Write to a process's link; return False if the link is closed."""
        try:
            await self._running[pid].send(line)
        except ConnectionError:
            return False
        return True

    async def receive(self, pid: int) -> bytes:
        return await self._running[pid].receive()

    async def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except SwerlError as error:
            return RemoteError(str(error), error.hint)
