"""Processes of live SGLang servers, found by their port, and what a test does to them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

WAIT_S = 900.0
"""Seconds for what takes 20 on a quiet machine: the start of a server."""


def kill_server(url: str) -> None:
    """Kill the server that listens at this URL, as a lost machine would."""
    os.kill(_listener(url), signal.SIGKILL)


def stop_server(url: str) -> Callable[[], None]:
    """Stop every process of a server: its port is open, and nothing answers. Returns its resume."""
    server = psutil.Process(_listener(url))
    processes = (server, *server.children(recursive=True))
    for process in processes:
        process.suspend()

    def resume() -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    return resume


def has_connection(pid: int, url: str) -> bool:
    """Say whether a process has an open connection to the server at this URL."""
    port = _port(url)
    return any(
        each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process(pid).net_connections("tcp")
    )


async def until(true: Callable[[], bool]) -> None:
    """Wait until something holds that only other processes bring about."""
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _listener(url: str) -> int:
    """Return the process id of a server itself, whose second word is -m, and not of its guard."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        arguments = path.read_bytes().decode(errors="replace").split("\0")
        if arguments[1:3] == ["-m", "sglang.launch_server"] and f"--port={_port(url)}" in arguments:
            return int(path.parent.name)
    raise ProcessLookupError(url)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
