"""A running command in a container.

A shell around the command (`scripts.COMMAND`) prints three-byte words after a token: `run` when the
command starts, its exit code and `end` when it ends, `end` on both streams. Only the daemon decides
that a command has ended, because the command could print the words itself.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import CappedOutput, Chunk, closed_input
from swerl.sandboxes._docker.api import ExecStream

_AHEAD_BYTES = 1 << 18
"""Size of unread output from which the command has to wait."""
_PAUSE_S = 0.005
"""Pause between reads of dropped output, so that endless output costs the controller little."""
_KILL_PAUSE_S = 0.2
_WORD_BYTES = 3
_REPORT_S = 6.0
"""Time in which a daemon reports a command's end. Docker 20.10 takes 4 s if the command before left
a process that holds its output."""
_LINGER_S = 0.1
"""Time in which the children of a finished command may still write to its output."""

SendSignal = Callable[[str], Awaitable[None]]
"""Sends the signal of this name, without SIG, to the command's processes."""
WaitForExit = Callable[[int | None], Awaitable[int]]
"""Waits until the provider reports the command's end; returns its exit code. The argument is the
code that the shell around the command printed, if it did."""
ExplainCut = Callable[[bytes], Awaitable[int]]
"""The same after its stream broke; the argument is its standard output so far."""


class DockerProcess:
    """A running command of a `docker` sandbox."""

    def __init__(
        self,
        stream: ExecStream,
        token: bytes,
        *,
        send_signal: SendSignal,
        wait_for_exit: WaitForExit,
        explain_cut: ExplainCut,
    ) -> None:
        self._stream = stream
        self._send_signal = send_signal
        self._wait_for_exit = wait_for_exit
        self._explain_cut = explain_cut
        self._concluding: asyncio.Task[None] | None = None
        self._frames = {is_stderr: _Frame(b"\0" + token) for is_stderr in (False, True)}
        self._chunks: deque[Chunk] = deque()
        self._waiting_bytes = 0
        self._bounded = True
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._input_open = True
        self._printed_code: int | None = None
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done when signals reach it."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit code."""
        self._pump = asyncio.ensure_future(self._run())
        self._pump.add_done_callback(self._finish)

    async def output(self) -> AsyncIterator[Chunk]:
        while chunk := await self._next():
            yield chunk

    async def send(self, data: bytes) -> None:
        if not self._input_open or self.ended.done():
            raise closed_input()
        try:
            await self._stream.send(data)
        except ConnectionError as error:
            raise closed_input() from error

    async def end_input(self) -> None:
        self._input_open = False
        self._stream.end_input()

    async def signal(self, number: int) -> None:
        try:
            name = signal.Signals(number).name.removeprefix("SIG")
        except ValueError as error:
            raise SandboxError(
                f"there is no signal {number}", hint="use one of Python's signal.Signals"
            ) from error
        if not self.ended.done():
            await self._send_signal(name)

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def ended_in_time(self) -> bool:
        """Return whether it has ended; waits a while if only the daemon's report is late."""
        if self._concluding:
            await asyncio.wait([self.ended], timeout=_REPORT_S)
        return self.ended.done()

    async def collect(self, kept: CappedOutput) -> None:
        """Read its output to the end into `kept`; safe to cancel and to call again."""
        while chunk := await self._next():
            if not kept.add(chunk):
                await asyncio.sleep(_PAUSE_S)

    async def kill(self) -> None:
        """Kill it and all processes that it started, and wait until it has ended."""
        self._bounded = False
        self._room.set()
        while True:
            await self._send_signal("KILL")
            if (await asyncio.wait([self.ended], timeout=_KILL_PAUSE_S))[0]:
                return

    def lose(self, error: SandboxLostError) -> None:
        self._fail(error)
        self._pump.cancel()

    def close(self) -> None:
        """Close its streams; processes that it left behind keep running."""
        self._pump.cancel()
        self._stream.close()

    async def _run(self) -> None:
        ends: set[bool] = set()
        while read := await self._stream.read():
            if self._take(*read):
                ends.add(read[1])
            if len(ends) == len(self._frames) and self._concluding is None:
                self._concluding = asyncio.ensure_future(self._conclude())
            while self._bounded and self._waiting_bytes > _AHEAD_BYTES:
                self._room.clear()
                await self._room.wait()
        if self._concluding:
            await asyncio.wait([self.ended])
        else:
            self._end(await self._explain_cut(b"".join(chunk.data for chunk in self._chunks)))

    async def _conclude(self) -> None:
        """Wait for the end that its streams announced; then stop reading them."""
        try:
            self._end(await self._wait_for_exit(self._printed_code))
        except SandboxError as error:
            self._fail(error)
        await asyncio.sleep(_LINGER_S)
        self._pump.cancel()

    def _take(self, data: bytes, is_stderr: bool) -> bool:
        """Take a piece of output; return whether it announces the end of its stream."""
        text, words = self._frames[is_stderr].take(data)
        if text:
            self._add(Chunk(text, is_stderr))
        if words and not self.begun.done():
            self.begun.set_result(None)
        for word in filter(str.isdigit, words):
            self._printed_code = int(word)
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
            self.ended.exception()  # the caller may not wait for it

    def _finish(self, pump: asyncio.Task[None]) -> None:
        if self._concluding:
            self._concluding.cancel()
        if not pump.cancelled() and (error := pump.exception()):
            self._fail(error)
        if not self.begun.done():
            self.begun.set_result(None)
        self._changed.set()


def new_token() -> str:
    """Return a random token for the words around a command; nothing prints it by chance."""
    return secrets.token_hex(16)


class _Frame:
    """Removes the words of the shell around a command from one of its streams."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._held = b""

    def take(self, data: bytes) -> tuple[bytes, list[str]]:
        """Return the command's own bytes in `data`, and the words."""
        data, text = self._held + data, b""
        words: list[str] = []
        while (start := data.find(self._token)) >= 0:
            text, rest = text + data[:start], data[start + len(self._token) :]
            if len(rest) < _WORD_BYTES:
                self._held = data[start:]
                return text, words
            words.append(rest[:_WORD_BYTES].decode("ascii", "replace"))
            data = rest[_WORD_BYTES:]
        size = _overlap(data, self._token)
        self._held = data[len(data) - size :]
        return text + data[: len(data) - size], words


def _overlap(data: bytes, token: bytes) -> int:
    """Return the number of bytes at the end of `data` that may be the start of `token`."""
    tail = data[-(len(token) - 1) :]
    start = tail.find(token[:1])
    while start >= 0:
        if token.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(token[:1], start + 1)
    return 0
