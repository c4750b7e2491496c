"""Run an engine's server as a child process: start it, wait until it serves, stop all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp

from swerl.core.errors import EngineError
from swerl.core.secrets import child_environment

GUARD = Path(__file__).with_name("_process_guard.py")
STOP_S = 5.0
"""Seconds for a server to end by itself before it is killed."""
GUARD_STOP_S = 10.0
"""Seconds beyond those for the guard to kill the rest; then the guard is killed."""

T = TypeVar("T")


@asynccontextmanager
async def child(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command with its output in `log`; leaving the context ends all its processes.

    The process is a guard, which exits with the command's code, or 128 plus a signal's number.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", str(GUARD), str(os.getpid()), str(STOP_S), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(**(env or {})),
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    try:
        yield process
    finally:
        await asyncio.shield(_stop(process))


async def until_ready(
    probe: Callable[[], Awaitable[T | None]],
    process: asyncio.subprocess.Process,
    log: Path,
    *,
    timeout_s: float,
) -> T:
    """Poll `probe` until it returns a value. Raises EngineError if the process ends first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                if process.returncode is not None:
                    raise _ended_early(process.returncode, log)
                if (answer := await probe()) is not None:
                    return answer
                await asyncio.sleep(0.05)
    raise EngineError(
        f"the engine did not serve within {timeout_s:.0f} s\n{_tail(log)}",
        hint=f"the whole log is {log}; the limit of a launched server is engine.start_timeout_s",
    )


def signal_of(code: int) -> int:
    """Return the signal that ended a process, 0 for none; a guard and a shell add 128 to it."""
    if code < 0:
        return -code
    return code - 128 if code > 128 else 0


def how_ended(code: int) -> str:
    """Describe an exit code: the signal that ended the process, or the code."""
    try:
        return f"killed by {signal.Signals(signal_of(code)).name}"
    except ValueError:
        return f"exit code {code}"


def _ended_early(code: int, log: Path) -> EngineError:
    """Build the error; a hint that the engine printed is kept as the hint."""
    lines = _tail(log).splitlines()
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    rest = "\n".join(line for line in lines if not line.startswith("hint: "))
    message = f"the engine ended before it served ({how_ended(code)})\n{rest}"
    return EngineError(message, hint=hints[-1] if hints else f"the whole log is {log}")


def _tail(log: Path, num_lines: int = 12) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.terminate()
        async with asyncio.timeout(STOP_S + GUARD_STOP_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Command and environment of one server."""

    url: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    start_timeout_s: float
    again: tuple[str, ...] = ()
    """Further flags of a restart."""


class Launched:
    """A server process on this machine. Implements Host; an async context manager."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return self.plan.url

    @property
    def gpus(self) -> tuple[str, ...]:
        return ()

    async def __aenter__(self) -> Launched:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineError."""
        await self.stop()
        plan = self.plan

        async def probe() -> str | None:
            return plan.url if await serves(plan.url) else None

        command = plan.command if self._process is None else (*plan.command, *plan.again)
        running = child(command, plan.log, env=plan.env)
        self._process = await self._stack.enter_async_context(running)
        await until_ready(probe, self._process, plan.log, timeout_s=plan.start_timeout_s)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def ended(self) -> str:
        assert self._process is not None
        return f"its process ended: {how_ended(await self._process.wait())}"


async def serves(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{url.rstrip('/')}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
