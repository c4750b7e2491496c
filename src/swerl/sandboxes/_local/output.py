"""What a command prints: read as it comes, so that a slow reader slows the command, not loses it.

Each stream is a pipe. Nothing is read ahead: what its reader has not asked for waits in the pipe,
and a command whose pipe is full waits too.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios

from swerl.core.sandbox import Chunk

_CHUNK_BYTES = 1 << 16
_LINGER_S = 0.1
"""How long a finished command's children may still write to its output."""


class Output:
    """The two output streams of a command."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        pipes = [os.pipe() for _ in range(2)]
        self._open = [read for read, _ in pipes]
        self._stderr = self._open[1]
        self.inside = tuple(write for _, write in pipes)
        """The descriptors that the command writes to; `started` closes them here."""
        self._changed: asyncio.Future[None] | None = None
        self._ended = False
        self._owed = 0
        """Bytes that the command left in its pipes when it ended."""
        self._until_s = 0.0
        for fd in self._open:
            os.set_blocking(fd, False)

    def started(self) -> None:
        """Forget the command's ends of the streams."""
        for fd in self.inside:
            os.close(fd)
        self.inside = ()

    def end(self) -> None:
        """Note that the command has ended; what it left can still be read."""
        if not self._ended:
            self._ended = True
            self._owed = sum(map(_waiting_bytes, self._open))
            self._until_s = self._loop.time() + _LINGER_S
            self._wake()

    async def next(self) -> Chunk | None:
        """Return the next piece, or None at the end; safe to cancel and to call again."""
        while self._open:
            if chunk := self._read():
                return chunk
            await self._wait()
            if self._ended and self._owed <= 0 and self._loop.time() >= self._until_s:
                self._close_streams()
        return None

    def close(self) -> None:
        """Let go of the streams."""
        self.started()
        self._close_streams()
        self._wake()

    def _read(self) -> Chunk | None:
        for fd in tuple(self._open):
            try:
                data = os.read(fd, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            if data:
                self._owed -= len(data)
                self._open.reverse()  # so that neither stream starves the other
                return Chunk(data, is_stderr=fd == self._stderr)
            self._open.remove(fd)
            os.close(fd)
        return None

    async def _wait(self) -> None:
        """Wait until there may be something to read, or the command or its time is over."""
        self._changed = self._loop.create_future()
        fds = tuple(self._open)
        for fd in fds:
            self._loop.add_reader(fd, self._wake)
        timer = self._loop.call_at(self._until_s, self._wake) if self._ended else None
        try:
            if fds:
                await self._changed
        finally:
            for fd in fds:
                self._loop.remove_reader(fd)
            if timer:
                timer.cancel()
            self._changed = None

    def _wake(self) -> None:
        if self._changed and not self._changed.done():
            self._changed.set_result(None)

    def _close_streams(self) -> None:
        for fd in self._open:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._open.clear()


def _waiting_bytes(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
