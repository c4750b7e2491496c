"""Running a command's coroutine, with Ctrl-C as a way to stop and not as an error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

from swerl.cli._output import stderr

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended: 128 + SIGINT."""


def run(work: Coroutine[Any, Any, T], *, after: str) -> T:
    """Run to the end. On Ctrl-C close everything, say `after`, and exit with 130."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        stderr().print(f"[yellow]interrupted[/]: {after}")
        raise typer.Exit(INTERRUPTED) from None
