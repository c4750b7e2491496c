"""sglang-router in front of servers that the run launched: its command, and the servers it knows.

The run alone says which: a server that is given up leaves the router's list, and is put back on it
once it holds the weights that serve. So the router's own health checks, retries and circuit
breakers are off. Control never goes through it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from swerl.core.errors import EngineError
from swerl.engines._sglang_crew import WATCH_S
from swerl.engines._sglang_server import Server

LISTED_S = 120.0
"""Seconds until a router that has just started must list every server."""
POLL_S = 0.1
SPARE_S = 60
"""Seconds that the router waits longer than its client, which gives up first."""
ENVIRONMENT = {"NO_PROXY": "*", "no_proxy": "*"}
"""Servers are never behind a proxy."""


def router_command(
    python: Path, *, port: int, metrics_port: int, reply_s: float
) -> tuple[str, ...]:
    """Return the command of a router without servers that keeps a session's key on one of them.

    A key that it sees for the first time goes to the server with the fewest keys.
    """
    return (
        *(str(python), "-m", "sglang_router.launch_router"),
        *("--policy=manual", "--assignment-mode=min_group"),
        *("--host=127.0.0.1", f"--port={port}"),
        *("--prometheus-host=127.0.0.1", f"--prometheus-port={metrics_port}"),
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
        f"--request-timeout-secs={math.ceil(reply_s) + SPARE_S}",
        "--log-level=warn",
    )


async def enrol(router: Server, servers: Sequence[Server]) -> bool:
    """Have a router list the servers in use and no others; return whether it already did.

    Raises EngineError where the router does not answer.
    """
    answer = await router.get("/workers", timeout_s=WATCH_S)
    ids = {str(each["url"]).rstrip("/"): str(each["id"]) for each in answer["workers"]}
    wanted = {server.url for server in servers if not server.lost}
    for url in wanted - ids.keys():
        await router.post("/workers", {"url": url}, timeout_s=WATCH_S)
    for url in ids.keys() - wanted:
        await router.delete(f"/workers/{ids[url]}", timeout_s=WATCH_S)
    return ids.keys() == wanted


async def enrol_all(router: Server, servers: Sequence[Server]) -> None:
    """Wait until a router lists these servers. Raises EngineError where it does not."""
    try:
        async with asyncio.timeout(LISTED_S):
            while not await enrol(router, servers):  # noqa: ASYNC110  another process's list
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise EngineError(
            f"the router at {router.url} does not list the servers after {LISTED_S:.0f} s",
            hint="its log is router.log; or set engine.router = false",
        ) from error
