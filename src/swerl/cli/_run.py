"""Running a command's coroutine, with Ctrl-C and SIGTERM as ways to stop and not as errors."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

from swerl.cli._output import stderr

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended: 128 + SIGINT."""
TERMINATED = 143
"""Exit code of a program that was asked to end: 128 + SIGTERM."""


class _TerminatedError(Exception):
    """SIGTERM came: from a scheduler, a container's end or a service manager."""


def run(work: Coroutine[Any, Any, T], *, after: str) -> T:
    """Run to the end. On Ctrl-C or SIGTERM close everything, say `after`, exit with 130 or 143."""
    try:
        return asyncio.run(_until_told(work))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except _TerminatedError:
        code = TERMINATED
    stderr().print(f"[yellow]interrupted[/]: {after}")
    raise typer.Exit(code) from None


async def _until_told(work: Coroutine[Any, Any, T]) -> T:
    """Await work, which SIGTERM cancels. Raises _TerminatedError once it has closed everything."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told = asyncio.Event()

    def end() -> None:
        told.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await work
    except asyncio.CancelledError:
        if told.is_set():
            raise _TerminatedError from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
