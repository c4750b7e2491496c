"""Open a client of SGLang servers, or of a router in front of some, and watch them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import aiohttp

from swerl.core.errors import EngineError, EngineLostError
from swerl.engines._sglang_fleet import Fleet
from swerl.engines._sglang_http import HttpEngine
from swerl.engines._sglang_router import enrol_all
from swerl.engines._sglang_server import Clients, Server
from swerl.engines._sglang_settings import ClientSettings
from swerl.engines._sglang_wire import ModelShape

IDLE_S = 2.0
"""Seconds an unused connection is kept; shorter than the servers' own, so none is found dead."""
CONNECT_S = 30.0
"""Seconds to open a connection: with thousands at once the last one waits for all before it."""
SPARE_FILES = 512
"""Open files beside the connections."""

Keeper: TypeAlias = Callable[[Fleet], Coroutine[None, None, None]]
"""Looks after a fleet's processes until it is cancelled."""


@asynccontextmanager
async def connect(
    urls: Sequence[str],
    *,
    shape: ModelShape | None = None,
    settings: ClientSettings | None = None,
    process: asyncio.subprocess.Process | None = None,
    keep: Keeper | None = None,
    router: str | None = None,
) -> AsyncIterator[HttpEngine]:
    """Open a client of one server, of several, or of a router, and watch them.

    `process` is the only server's, where it is ours: when it ends nobody asks that server again.
    `router` is the URL of one that the run launched in front of its servers, which it learns here.
    `keep` looks after servers that can be started again, until it is cancelled. Raises
    EngineLostError when one of them does not answer.
    """
    settings = settings or ClientSettings()
    _allow_files(settings.max_in_flight + SPARE_FILES)
    async with (
        _pool(settings.max_in_flight) as generate,
        _pool(0) as control,
    ):
        clients = Clients(generate, control)
        fleet = Fleet(
            urls,
            clients,
            mode=settings.pause_mode,
            load_s=settings.load_s,
            answers_in_loads=settings.answers_in_loads,
        )
        fleet.restarts = keep is not None
        if router:
            fleet.crew.router, fleet.crew.owns_router = Server(router, clients), True
        await _find(fleet, urls)
        watches = [asyncio.create_task(fleet.watch())]
        if process:
            watches.append(asyncio.create_task(fleet.mourn(process)))
        if keep:
            watches.append(asyncio.create_task(keep(fleet)))
        engine = HttpEngine(fleet, shape or ModelShape(), settings)
        try:
            yield engine
        finally:
            for watch in watches:
                watch.cancel()
            await engine.close()


async def _find(fleet: Fleet, urls: Sequence[str]) -> None:
    try:
        await fleet.discover()
        await fleet.check()
        if fleet.crew.router and fleet.crew.owns_router:
            await enrol_all(fleet.crew.router, fleet.crew.servers)
    except EngineLostError as error:
        raise EngineLostError(
            f"no SGLang server answers: {error}",
            hint="start it, or leave engine.url out to launch one",
        ) from error
    except EngineError as error:
        raise EngineError(
            f"{', '.join(urls)}: no SGLang server and no router of some: {error}",
            hint="engine.url is a base URL, without a path",
        ) from error


@asynccontextmanager
async def _pool(limit: int) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=IDLE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield client


def _allow_files(wanted: int) -> None:
    """Raise this process's limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
