"""SGLang servers of one's own: started, watched, and started again a few times when they die."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from swerl.engines._process import child, until_ready
from swerl.engines._sglang_fleet import Fleet
from swerl.engines._sglang_server import Server
from swerl.errors import EngineError


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How one server is started."""

    url: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    start_timeout_s: float


class Launched:
    """One server's process, whichever start it is in. An async context manager."""

    def __init__(self, plan: LaunchPlan, *, restarts: int) -> None:
        self.plan = plan
        self._restarts = restarts
        self._stack = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Launched:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def keep(self, server: Server) -> None:
        """Start the process again whenever it ends; give the server up for good at the last.

        It starts with the weights of the run's beginning; whoever watches the fleet gives it those
        that serve before it is used.
        """
        for number in range(1, self._restarts + 1):
            why = await self._end()
            server.usable_again = False
            server.lose(f"{why}; it is started again ({number} of {self._restarts})")
            try:
                await self._start()
            except EngineError as error:
                server.lose(error)
                await self._stack.aclose()  # one that hangs would never end by itself
                continue
            server.fresh()
        server.end(await self._end())

    async def _start(self) -> None:
        await self._stack.aclose()
        plan = self.plan

        async def probe() -> str | None:
            return plan.url if await serves(plan.url) else None

        running = child(plan.command, plan.log, env=plan.env)
        self._process = await self._stack.enter_async_context(running)
        await until_ready(probe, self._process, plan.log, timeout_s=plan.start_timeout_s)

    async def _end(self) -> str:
        assert self._process is not None
        return f"its process ended with exit code {await self._process.wait()}"


class Keep(Protocol):
    """Looks after the processes of a fleet until cancelled."""

    def __call__(self, fleet: Fleet) -> Coroutine[None, None, None]: ...


def keeper(launched: Sequence[Launched]) -> Keep:
    """Return what looks after these processes, which are the fleet's servers in order."""

    async def keep(fleet: Fleet) -> None:
        servers = {server.url: server for server in fleet.crew.servers}
        await asyncio.gather(*(each.keep(servers[each.plan.url]) for each in launched))

    return keep


async def serves(url: str) -> bool:
    """Ask a server whether it is up."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{url.rstrip('/')}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def free_port() -> int:
    """Return a port of the loopback interface that is free for a while."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
