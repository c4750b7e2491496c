"""Read logs in bounded time: large ones in a child process with limits.

Code under test writes the log, so nothing about it is known but its size. Every parser takes linear
time. A small log is read at once; a large one would hold up the event loop, so a child process
reads it. The kernel ends the child past its limits, also in the middle of a pattern.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from swerl.core.grade import TestStatus
from swerl.grading import python_logs
from swerl.grading.log_parsers import LogError, address_of, parse_log
from swerl.grading.statuses import Parser, Statuses

_INLINE_CHARS = 1 << 16
"""Largest log that the event loop reads itself. It takes 30 ms at most, a child process over 50 ms,
and most logs are smaller."""
_LIMIT_S = 4.0
"""Default limit of a child process: twice the CPU time of the slowest parser for 8 MiB, the largest
log that a sandbox returns."""
_CHILD = (
    *("-I", "-X", "utf8", "-c"),
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from swerl.grading.log_parsers import read_in_child as read; "
    "read(sys.argv[1], int(sys.argv[2]))",
)


async def read_log(parse: Parser, log: str, limit_s: float = _LIMIT_S) -> Statuses:
    """Read a log with a parser that is a function of a module. Raises LogError.

    `limit_s` is CPU time, which other work on the machine does not use up, in whole seconds.
    """
    address = address_of(parse)
    if len(log) <= _INLINE_CHARS:
        return parse_log(parse, log)
    statuses = {each.value: each for each in TestStatus}
    found: Statuses = {}
    async for part in _read_apart(address, log, limit_s):
        found.update((name, statuses[status]) for name, status in part.items())
    return found


async def read_durations(log: str, limit_s: float = _LIMIT_S) -> dict[str, float]:
    """Return seconds by test from pytest's table; empty if the log cannot be read."""
    if len(log) <= _INLINE_CHARS:
        return python_logs.durations(log)
    found: dict[str, float] = {}
    with suppress(LogError):
        async for part in _read_apart(address_of(python_logs.durations), log, limit_s):
            found.update(part)
    return found


async def _read_apart(address: str, log: str, limit_s: float) -> AsyncIterator[dict[str, Any]]:
    """Read a log in a child process and yield its result in parts. Raises LogError."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *_CHILD, address, str(max(1, round(limit_s))), *sys.path),
        env={},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await child.communicate(log.encode("utf-8", "surrogatepass"))
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise LogError(f"reading it takes more than {limit_s:g} s of CPU time")
    if child.returncode:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        raise LogError((lines or [f"the parser ended with exit code {child.returncode}"])[-1])
    *parts, last = out.splitlines()
    if problem := json.loads(last):
        raise LogError(problem)
    for part in parts:
        yield json.loads(part)
        # One part takes milliseconds; other work on the event loop runs in between.
        await asyncio.sleep(0)
