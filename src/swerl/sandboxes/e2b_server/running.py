"""One command under way and everybody who listens to it.

What it prints while nobody listens is kept up to a cap, the newest of it, for whoever connects
next. A listener that is slow slows the command; one that leaves gives back what it did not take.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from swerl.core.chat import Json
from swerl.core.contracts import Process
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.spec import Spec

BACKLOG_BYTES = 4 << 20
"""Most output kept for a listener to come."""
_QUEUE_LENGTH = 32
"""Chunks that wait for one listener before the command has to."""
_DEATH_S = 2.0
_SIGNALS = {signal.SIGKILL: "killed", signal.SIGTERM: "terminated"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    by_signal: int = 0
    """The signal that a client sent and that ended it; 0 where it ended by itself."""

    def message(self) -> dict[str, Json]:
        """Return it as the SDK reads it; after a signal the exit code is -1."""
        if self.by_signal:
            status = f"signal: {_SIGNALS.get(signal.Signals(self.by_signal), self.by_signal)}"
            return {"exitCode": -1, "exited": False, "status": status, "error": status}
        status = f"exit status {self.code}"
        body: dict[str, Json] = {"exitCode": self.code, "exited": True, "status": status}
        return {**body, "error": status} if self.code else body


Event = Chunk | Ended | Failure


class Listener:
    """Takes a command's events in order; the last is Ended or a Failure."""

    def __init__(self) -> None:
        self.waiting: deque[Chunk] = deque()
        self._last: Ended | Failure | None = None
        self._has_left = False
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()

    async def next(self) -> Event:
        """Return the next event; safe to cancel and to call again."""
        while not self.waiting:
            if self._last is not None:
                return self._last
            self._arrived.clear()
            await self._arrived.wait()
        self._taken.set()
        return self.waiting.popleft()

    async def put(self, chunk: Chunk) -> None:
        """Hand a chunk over, when there is room."""
        while len(self.waiting) >= _QUEUE_LENGTH and not self._has_left:
            self._taken.clear()
            await self._taken.wait()
        self.waiting.append(chunk)
        self._arrived.set()

    def finish(self, last: Ended | Failure) -> None:
        """Say how it ended."""
        self._last = last
        self._arrived.set()

    def leave(self) -> None:
        """Wait for nothing any more."""
        self._has_left = True
        self._taken.set()


class Running:
    """A command under way."""

    def __init__(
        self, pid: int, spec: Spec, process: Process, chunks: AsyncIterator[Chunk]
    ) -> None:
        self.pid = pid
        self.spec = spec
        self.terminal = ""
        """Path of its terminal inside; empty where it has none."""
        self.is_dead = False
        """Whether it was killed; its last output may still be on the way."""
        self._process = process
        self._chunks = chunks
        self._listeners: list[Listener] = []
        self._backlog: deque[Chunk] = deque()
        self._backlog_bytes = 0
        self._last: Ended | Failure | None = None
        self._signalled: set[int] = set()
        self._was_heard = False

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Listen: to what nobody has heard yet, and to all that comes."""
        self._was_heard = True
        listener = Listener()
        listener.waiting.extend(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0
        self._listeners.append(listener)
        if self._last is not None:
            listener.finish(self._last)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
            listener.leave()
            if not self._listeners and self._last is None:
                for chunk in listener.waiting:
                    self._keep(chunk)

    async def pump(self) -> Ended:
        """Hand out what it prints until it has ended, and return how."""
        async for chunk in self._chunks:
            await self.hand_out(chunk)
        code = await self._process.wait()
        return Ended(code, code - 128 if code - 128 in self._signalled else 0)

    async def hand_out(self, chunk: Chunk) -> None:
        """Give a chunk to all who listen, or keep it."""
        if not chunk.data:
            return
        if not self._listeners:
            self._keep(chunk)
        for listener in tuple(self._listeners):
            await listener.put(chunk)

    def finish(self, last: Ended | Failure) -> None:
        """Tell all who listen, and who will, how it ended; only the first word counts.

        Nobody finds a command that has ended, so that what it printed is kept only for who
        started it and has not listened yet.
        """
        if self._last is None:
            self._last = last
            if self._was_heard:
                self._backlog.clear()
            for listener in self._listeners:
                listener.finish(last)

    async def signal(self, number: int) -> None:
        """Send a signal to it and to all that it started; SIGKILL waits until it is dead."""
        self._signalled.add(number)
        await self._process.signal(number)
        if number == signal.SIGKILL:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_S):
                    await self._process.wait()
                    self.is_dead = True

    async def send(self, data: bytes, *, to_terminal: bool) -> None:
        """Write to its input."""
        if to_terminal != bool(self.terminal):
            kind = "has no terminal" if to_terminal else "has a terminal, which takes its input"
            raise Failure(Code.INTERNAL, f"process {self.pid} {kind}")
        if not self.spec.takes_input:
            raise Failure(Code.INTERNAL, "stdin not enabled or closed")
        await self._process.send(data)

    async def end_input(self) -> None:
        """Close its input."""
        if self.terminal:
            message = "cannot close the input of a terminal; send Ctrl+D (0x04) instead"
            raise Failure(Code.INTERNAL, message)
        await self._process.end_input()

    def _keep(self, chunk: Chunk) -> None:
        self._backlog.append(chunk)
        self._backlog_bytes += len(chunk.data)
        while self._backlog_bytes > BACKLOG_BYTES:
            self._backlog_bytes -= len(self._backlog.popleft().data)
