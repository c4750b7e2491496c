"""SGLang servers of one's own: started, watched, and started again a few times when they die."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from swerl.core.errors import SwerlError
from swerl.engines._process import child, how_ended, until_ready
from swerl.engines._sglang_fleet import Fleet
from swerl.engines._sglang_server import Server


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How one server is started."""

    url: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    start_timeout_s: float
    again: tuple[str, ...] = ()
    """Flags besides, from the second start on."""


class Host(Protocol):
    """One server's process, whichever start it is in."""

    @property
    def url(self) -> str:
        """Where it serves."""

    async def start(self) -> None:
        """End what runs, start it, and wait until it serves. Raises SwerlError."""

    async def stop(self) -> None:
        """End it, also where it reacts to nothing."""

    async def ended(self) -> str:
        """Wait until it has ended by itself or by `stop`, and say how."""


class Launched:
    """Implements Host on this machine. An async context manager."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it serves."""
        return self.plan.url

    async def __aenter__(self) -> Launched:
        try:
            await self.start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """Start it and wait until it serves. Raises EngineError."""
        await self._stack.aclose()
        plan = self.plan

        async def probe() -> str | None:
            return plan.url if await serves(plan.url) else None

        command = plan.command if self._process is None else (*plan.command, *plan.again)
        running = child(command, plan.log, env=plan.env)
        self._process = await self._stack.enter_async_context(running)
        await until_ready(probe, self._process, plan.log, timeout_s=plan.start_timeout_s)

    async def stop(self) -> None:
        """End it."""
        await self._stack.aclose()

    async def ended(self) -> str:
        """Wait until it has ended."""
        assert self._process is not None
        return f"its process ended: {how_ended(await self._process.wait())}"


class Keep(Protocol):
    """Looks after the processes of a fleet until cancelled."""

    def __call__(self, fleet: Fleet) -> Coroutine[None, None, None]: ...


def keeper(hosts: Sequence[Host], *, restarts: int, tell: Callable[[str], None]) -> Keep:
    """Return what looks after these processes, the fleet's servers and its router."""

    async def keep_all(fleet: Fleet) -> None:
        router = [fleet.crew.router] if fleet.crew.router else []
        servers = {server.url: server for server in (*fleet.crew.servers, *router)}
        await asyncio.gather(
            *(keep(host, servers[host.url], restarts=restarts, tell=tell) for host in hosts)
        )

    return keep_all


async def keep(host: Host, server: Server, *, restarts: int, tell: Callable[[str], None]) -> None:
    """Start a server again whenever it ends or hangs; give it up for good at the last.

    It starts with the weights of the run's beginning; whoever watches the fleet gives it those
    that serve before it is used.
    """
    for number in range(1, restarts + 1):
        why = await _until_over(host, server)
        told = f"{why}; it is started again ({number} of {restarts})"
        tell(f"the server at {host.url} is gone: {told}")
        server.usable_again = False
        server.lose(told)
        try:
            await host.start()
        except SwerlError as error:
            tell(f"the server at {host.url} did not come back: {error}")
            server.lose(error)
            await host.stop()  # one that hangs would never end by itself
            continue
        server.fresh()
    why = await _until_over(host, server)
    tell(f"the server at {host.url} is gone for good: {why}")
    server.end(why)


async def _until_over(host: Host, server: Server) -> str:
    """Wait until a server ends, or end it once it hangs; say which."""
    ended = asyncio.ensure_future(host.ended())
    hung = asyncio.ensure_future(server.hung.wait())
    try:
        await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        await host.stop()
        return "it ran and answered nothing"
    finally:
        ended.cancel()
        hung.cancel()


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
