"""A command under way in an `e2b` sandbox, its input and output carried as text."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator
from typing import Any

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk
from swerl.sandboxes._e2b.errors import CutError, GoneError
from swerl.sandboxes._e2b.job import Job, Shown
from swerl.sandboxes._e2b.runner import Runner
from swerl.sandboxes._e2b.sdk import Shell

_PIECE_BYTES = 144 * 1024
_WAITING_CHUNKS = 64
"""Pieces of output read ahead of who reads them; then the stream waits."""


class E2BProcess:
    """A command that takes input and shows its output as it comes."""

    def __init__(self, runner: Runner, job: Job) -> None:
        self._runner = runner
        self._job = job
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(_WAITING_CHUNKS)
        self._shown = Shown(self._chunks.put)
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._carrier: asyncio.Task[None] | None = None
        self._shell: Shell | None = None
        self._released = asyncio.Event()
        self._input_ended = False
        self._sending = asyncio.Lock()

    async def begin(self) -> None:
        """Start it. Raises SandboxError where it cannot be started."""
        self._carrier = asyncio.ensure_future(self._carry())
        launched = asyncio.ensure_future(self._shown.launched.wait())
        either: set[asyncio.Future[Any]] = {launched, self._code}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        launched.cancel()
        if self._code.done():
            await self.wait()

    async def close(self) -> None:
        """Kill it and everything that it started."""
        self._released.set()
        if self._carrier:
            if not self._code.done():
                self._carrier.cancel()
            await asyncio.gather(self._carrier, return_exceptions=True)

    async def output(self) -> AsyncIterator[Chunk]:
        """Yield what it prints, as it comes, until it has ended. For one reader."""
        while chunk := await self._chunks.get():
            yield chunk
        self._chunks.put_nowait(None)

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises SandboxError when that is closed."""
        async with self._sending:
            for start in range(0, len(data), _PIECE_BYTES):
                piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
                await self._say(f"{len(piece)}\n{piece}")

    async def end_input(self) -> None:
        """Close its standard input, after what is being sent."""
        async with self._sending:
            if not self._input_ended and not self._code.done():
                await self._say(".\n")
            self._input_ended = True

    async def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started; nothing once it has ended."""
        if number not in range(1, signal.NSIG):
            raise SandboxError(
                f"there is no signal {number}", hint=f"signals are 1 to {signal.NSIG - 1}"
            )
        if not self._code.done():
            await self._runner.unless_lost(self._runner.signal(self._job, number))

    async def wait(self) -> int:
        """Return its exit code, 128 + n after signal n. Raises SandboxLostError."""
        return await asyncio.shield(self._code)

    async def _carry(self) -> None:
        """Hold the command from its start until it is let go of."""
        try:
            async with self._runner.follow(self._job, self._shown) as shell:
                self._shell = shell
                self._code.set_result(await self._runner.unless_lost(self._watch(shell)))
                await self._chunks.put(None)
                await self._released.wait()
        except SandboxError as error:
            if not self._code.done():
                self._code.set_exception(error)
                self._code.exception()  # nobody needs to wait for it
        finally:
            if not self._code.done():
                self._code.cancel()
            if self._chunks.full():
                self._chunks.get_nowait()
            self._chunks.put_nowait(None)

    async def _watch(self, shell: Shell) -> int:
        """Show its output to the end, on other streams where the first one breaks."""
        try:
            await shell.wait()
        except (CutError, GoneError):
            await self._runner.require_exists()
        self._runner.require_accepted(self._shown)
        if not self._shown.complete:
            await self._runner.resume(self._job, self._shown)
        assert self._shown.report is not None
        return self._shown.report.exit_code

    async def _say(self, text: str) -> None:
        if self._input_ended or self._code.done() or self._shell is None:
            raise _closed_input()
        try:
            await self._runner.unless_lost(self._shell.send(text))
        except SandboxLostError:
            raise
        except SandboxError as error:
            await self._runner.require_exists()
            raise _closed_input() from error


def _closed_input() -> SandboxError:
    message = "the command's standard input is closed"
    return SandboxError(message, hint="it has ended, or the stream that carried its input broke")
