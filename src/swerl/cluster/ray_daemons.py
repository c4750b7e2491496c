"""Starting Ray's daemons on the machine that this runs on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from swerl.core.errors import ClusterError
from swerl.engines._process import child

START_S = 180.0
"""Seconds for a member to join: a slow file system takes most of them to read Python's packages."""
TRIES = 3
"""Ray gives a machine 30 seconds to start; one that is busy for a while may need more."""
RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Nothing is reported to anybody; and ranks, being Ray's children, do not yield to others."""


def ray_start(address: str, *, cpus: int, gpus: int) -> list[str]:
    """Return the command that starts Ray's daemons here and ends with them."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={address}", "--disable-usage-stats", "--log-style=record"]
    return [*command, f"--num-cpus={cpus}", f"--num-gpus={gpus}"]


async def start_head(stack: AsyncExitStack, command: Sequence[str], log: Path) -> None:
    """Start the head, again where a busy machine was too slow for it. Raises ClusterError."""
    for _ in range(TRIES):
        begin = log.stat().st_size if log.exists() else 0
        running = child(command, log, env=RAY_SETTINGS)
        process = await stack.enter_async_context(running)
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    if has_started(log, begin):
                        return
                    await asyncio.sleep(0.1)
        if process.returncode is None:
            break
    raise ClusterError(f"Ray's head did not come up: {tail(log)}", hint=f"its whole log is {log}")


def has_started(log: Path, begin: int = 0) -> bool:
    """Return whether Ray says in its log, from byte `begin` on, that its daemons run."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return b"Ray runtime started" in file.read()
    return False


def tail(log: Path) -> str:
    """Return the last words of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(line.strip() for line in lines[-3:]) or "it said nothing"
