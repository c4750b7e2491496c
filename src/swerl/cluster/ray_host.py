"""The actor that stands for one machine of a run: it holds the machine's share, starts what runs.

Its processes are its children, so they die with it; it dies with the run's controller.
"""

# heavy imports: this file only runs in Ray's own processes

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from swerl.cluster.node import Ended, LocalNode, LocalProcess, Order
from swerl.core.errors import SwerlError


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of swerl's, as a value: errors that cross Ray lose their fields."""

    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class About:
    """What a machine says of itself."""

    name: str
    address: str
    gpus: tuple[str, ...]


class RayHost:
    """One machine's actor; every method runs in its one event loop."""

    def __init__(self) -> None:
        self._node = LocalNode()
        self._running: dict[int, LocalProcess] = {}

    async def about(self) -> About:
        """Return the machine's name, its address and the GPUs that Ray gave this actor."""
        gpus = tuple(str(each) for each in ray.get_gpu_ids())
        return About(platform.node(), ray.util.get_node_ip_address(), gpus)

    async def start(self, order: Order) -> int | Failed:
        """Start a process and return its id."""
        try:
            process = await self._node.start(order)
        except SwerlError as error:
            return Failed(str(error), error.hint)
        self._running[process.pid] = process
        return process.pid

    async def ended(self, pid: int) -> Ended:
        """Wait for the end of a process."""
        return await asyncio.shield(self._running[pid].ended)

    async def signal(self, pid: int, number: int) -> None:
        """Send a signal."""
        await self._running[pid].signal(number)

    async def send(self, pid: int, line: bytes) -> bool:
        """Write to a process's link; False where it reads no more."""
        try:
            await self._running[pid].send(line)
        except ConnectionError:
            return False
        return True

    async def receive(self, pid: int) -> bytes:
        """Return a process's next line."""
        return await self._running[pid].receive()

    async def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a function in a thread."""
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except SwerlError as error:
            return Failed(str(error), error.hint)
