"""A running command of an `e2b` sandbox; its input and output travel as text."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator
from typing import Any

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk, closed_input
from swerl.sandboxes._e2b.runner import JobOutput, Runner, ShellJob
from swerl.sandboxes._e2b.sdk import CutError, GoneError, ShellStream

_PIECE_BYTES = 144 * 1024
_WAITING_CHUNKS = 64
"""Pieces of unread output from which the stream waits."""


class E2BProcess:
    """A running command of an `e2b` sandbox."""

    def __init__(self, runner: Runner, job: ShellJob) -> None:
        self._runner = runner
        self._job = job
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(_WAITING_CHUNKS)
        self._job_output = JobOutput(self._chunks.put)
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._carrier: asyncio.Task[None] | None = None
        self._shell: ShellStream | None = None
        self._released = asyncio.Event()
        self._input_ended = False
        self._sending = asyncio.Lock()

    async def begin(self) -> None:
        self._carrier = asyncio.ensure_future(self._carry())
        launched = asyncio.ensure_future(self._job_output.launched.wait())
        either: set[asyncio.Future[Any]] = {launched, self._code}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        launched.cancel()
        if self._code.done():
            await self.wait()

    async def close(self) -> None:
        self._released.set()
        if self._carrier:
            if not self._code.done():
                self._carrier.cancel()
            await asyncio.gather(self._carrier, return_exceptions=True)

    async def output(self) -> AsyncIterator[Chunk]:
        while chunk := await self._chunks.get():
            yield chunk
        self._chunks.put_nowait(None)

    async def send(self, data: bytes) -> None:
        async with self._sending:
            for start in range(0, len(data), _PIECE_BYTES):
                piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
                await self._send_text(f"{len(piece)}\n{piece}")

    async def end_input(self) -> None:
        """Close its standard input after the data that is being sent."""
        async with self._sending:
            if not self._input_ended and not self._code.done():
                await self._send_text(".\n")
            self._input_ended = True

    async def signal(self, number: int) -> None:
        if number not in range(1, signal.NSIG):
            raise SandboxError(
                f"there is no signal {number}", hint=f"signals are 1 to {signal.NSIG - 1}"
            )
        if not self._code.done():
            await self._runner.unless_lost(self._runner.signal(self._job, number))

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def _carry(self) -> None:
        """Run the command and keep its stream open until it is closed."""
        try:
            async with self._runner.follow(self._job, self._job_output) as shell:
                self._shell = shell
                self._code.set_result(await self._runner.unless_lost(self._watch(shell)))
                await self._chunks.put(None)
                await self._released.wait()
        except SandboxError as error:
            if not self._code.done():
                self._code.set_exception(error)
                self._code.exception()  # the caller may not wait for it
        finally:
            if not self._code.done():
                self._code.cancel()
            if self._chunks.full():
                self._chunks.get_nowait()
            self._chunks.put_nowait(None)

    async def _watch(self, shell: ShellStream) -> int:
        """Read its output to the end, over new streams if the first one breaks."""
        try:
            await shell.wait()
        except (CutError, GoneError):
            await self._runner.require_exists()
        self._runner.require_accepted(self._job_output)
        if not self._job_output.complete:
            await self._runner.resume(self._job, self._job_output)
        assert self._job_output.result is not None
        return self._job_output.result.exit_code

    async def _send_text(self, text: str) -> None:
        if self._input_ended or self._code.done() or self._shell is None:
            raise closed_input()
        try:
            await self._runner.unless_lost(self._shell.send(text))
        except SandboxLostError:
            raise
        except SandboxError as error:
            await self._runner.require_exists()
            raise closed_input() from error
