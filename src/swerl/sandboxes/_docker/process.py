"""A command under way in a container, as the controller sees it."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk
from swerl.sandboxes._docker.hijack import Stream
from swerl.sandboxes._docker.output import KeptUntil, Seam

_AHEAD_BYTES = 1 << 18
"""How much output may wait for its reader before the command has to."""
_PAUSE_S = 0.005
"""Pause between reads of what is dropped, so that endless output costs the controller little."""
_KILL_PAUSE_S = 0.2
_TELL_S = 6.0
"""How late a daemon may tell that a command ended. Docker 20.10 takes 4 s where the one before left
a process that holds its output."""
_LINGER_S = 0.1
"""How long a finished command's children may still write to its output."""

Order = Callable[[str], Awaitable[None]]
"""Has a signal of this name, without SIG, sent to the command's processes."""
Ask = Callable[[], Awaitable[int]]
"""Waits until the daemon says that the command has ended; returns its exit code."""
Cut = Callable[[bytes], Awaitable[int]]
"""The same where its stream ended, by what was on its standard output."""


class DockerProcess:
    """A command; `close` lets go of it."""

    def __init__(self, stream: Stream, token: bytes, *, order: Order, ask: Ask, cut: Cut) -> None:
        self._stream = stream
        self._order = order
        self._ask = ask
        self._cut = cut
        self._asking: asyncio.Task[None] | None = None
        self._seams = {is_stderr: Seam(b"\0" + token) for is_stderr in (False, True)}
        self._chunks: deque[Chunk] = deque()
        self._waiting_bytes = 0
        self._bounded = True
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._input_open = True
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done once signals reach it."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit code."""
        self._pump = asyncio.ensure_future(self._run())
        self._pump.add_done_callback(self._finish)

    async def output(self) -> AsyncIterator[Chunk]:
        """Yield what it prints, as it comes, until it has ended. For one reader."""
        while chunk := await self._next():
            yield chunk

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises SandboxError when that is closed."""
        if not self._input_open or self.ended.done():
            raise _closed_input()
        try:
            await self._stream.send(data)
        except ConnectionError as error:
            raise _closed_input() from error

    async def end_input(self) -> None:
        """Close its standard input."""
        self._input_open = False
        self._stream.end_input()

    async def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started; nothing once it has ended."""
        try:
            name = signal.Signals(number).name.removeprefix("SIG")
        except ValueError as error:
            raise SandboxError(
                f"there is no signal {number}", hint="take one of Python's signal.Signals"
            ) from error
        if not self.ended.done():
            await self._order(name)

    async def wait(self) -> int:
        """Return its exit code, 128 + n after signal n. Raises SandboxLostError."""
        return await asyncio.shield(self.ended)

    async def ended_in_time(self) -> bool:
        """Say whether it has ended, where only the daemon's word of that is late."""
        if self._asking:
            await asyncio.wait([self.ended], timeout=_TELL_S)
        return self.ended.done()

    async def collect(self, kept: KeptUntil) -> None:
        """Read its output to the end into `kept`; safe to cancel and to call again."""
        while chunk := await self._next():
            if not kept.add(chunk):
                await asyncio.sleep(_PAUSE_S)

    async def kill(self) -> None:
        """Kill it and everything that it started, and wait until it has ended."""
        self._bounded = False
        self._room.set()
        while True:
            await self._order("KILL")
            if (await asyncio.wait([self.ended], timeout=_KILL_PAUSE_S))[0]:
                return

    def lose(self, error: SandboxLostError) -> None:
        """Note that its sandbox is gone."""
        self._fail(error)
        self._pump.cancel()

    def close(self) -> None:
        """Let go of its streams; what it left running runs on."""
        self._pump.cancel()
        self._stream.close()

    async def _run(self) -> None:
        """Read both streams up to their ends."""
        ends: set[bool] = set()
        while read := await self._stream.read():
            if self._take(*read):
                ends.add(read[1])
            if len(ends) == len(self._seams) and self._asking is None:
                self._asking = asyncio.ensure_future(self._conclude())
            while self._bounded and self._waiting_bytes > _AHEAD_BYTES:
                self._room.clear()
                await self._room.wait()
        if self._asking:
            await asyncio.wait([self.ended])
        else:
            self._end(await self._cut(b"".join(chunk.data for chunk in self._chunks)))

    async def _conclude(self) -> None:
        """Wait for the end that its streams told of; then give up who still holds them."""
        try:
            self._end(await self._ask())
        except SandboxError as error:
            self._fail(error)
        await asyncio.sleep(_LINGER_S)
        self._pump.cancel()

    def _take(self, data: bytes, is_stderr: bool) -> bool:
        """Take up output; return whether the stream says that it ends."""
        text, words = self._seams[is_stderr].take(data)
        if text:
            self._add(Chunk(text, is_stderr))
        if words and not self.begun.done():
            self.begun.set_result(None)
        return "end" in words

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._waiting_bytes += len(chunk.data)
        self._changed.set()

    async def _next(self) -> Chunk | None:
        while not self._chunks:
            if self._pump.done():
                return None
            self._changed.clear()
            await self._changed.wait()
        chunk = self._chunks.popleft()
        self._waiting_bytes -= len(chunk.data)
        self._room.set()
        return chunk

    def _end(self, code: int) -> None:
        self._input_open = False
        if not self.ended.done():
            self.ended.set_result(code)

    def _fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # nobody needs to wait for it

    def _finish(self, pump: asyncio.Task[None]) -> None:
        if self._asking:
            self._asking.cancel()
        if not pump.cancelled() and (error := pump.exception()):
            self._fail(error)
        if not self.begun.done():
            self.begun.set_result(None)
        self._changed.set()


def new_token() -> str:
    """Return what marks the end of a command's streams; nothing prints it by chance."""
    return secrets.token_hex(16)


def _closed_input() -> SandboxError:
    message = "the command's standard input is closed"
    return SandboxError(message, hint="it has ended, or its input was ended")
