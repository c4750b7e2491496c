"""What looking after any server on a node takes: to end it, and to quote its log."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from swerl.cluster.node import Running

END_S = 30.0
"""Seconds for a server to end by itself."""
_NUM_QUOTED = 3


async def end_server(process: Running | None) -> None:
    """Ask a server to end, and kill it where it does not; nothing where none was started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process is None or process.ended.done():
            return
        await process.signal(number)
        await asyncio.wait([process.ended], timeout=END_S)


def last_lines(log: Path) -> str:
    """Return the end of a server's log in one line; empty where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(line.strip() for line in lines[-_NUM_QUOTED:])
