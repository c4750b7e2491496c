"""The two output streams of a command, read on demand.

Output that its reader has not requested stays in a pipe. A command blocks while its pipe is full.
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
"""Time in which the children of a finished command may still write to its output."""


class Output:
    """The two output streams of a command."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        pipes = [os.pipe() for _ in range(2)]
        self._open = [read for read, _ in pipes]
        self._stderr = self._open[1]
        self.inside = tuple(write for _, write in pipes)
        """The descriptors that the command writes to."""
        self._changed: asyncio.Future[None] | None = None
        self._ended = False
        self._unread = 0
        """Bytes in the pipes when the command ended, less those read since."""
        self._until_s = 0.0
        for fd in self._open:
            os.set_blocking(fd, False)

    def close_inside(self) -> None:
        """Close the command's ends of the streams here, after it has started."""
        for fd in self.inside:
            os.close(fd)
        self.inside = ()

    def end(self) -> None:
        """Note that the command has ended; its remaining output can still be read."""
        if not self._ended:
            self._ended = True
            self._unread = sum(map(_waiting_bytes, self._open))
            self._until_s = self._loop.time() + _LINGER_S
            self._wake()

    async def next(self) -> Chunk | None:
        """Return the next piece, or None at the end; safe to cancel and to call again."""
        while self._open:
            if chunk := self._read():
                return chunk
            await self._wait()
            # A process that the command left behind may hold the pipe open forever.
            if self._ended and self._unread <= 0 and self._loop.time() >= self._until_s:
                self._close_streams()
        return None

    def close(self) -> None:
        self.close_inside()
        self._close_streams()
        self._wake()

    def _read(self) -> Chunk | None:
        for fd in tuple(self._open):
            try:
                data = os.read(fd, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            if data:
                self._unread -= len(data)
                self._open.reverse()  # so that neither stream starves the other
                return Chunk(data, is_stderr=fd == self._stderr)
            self._open.remove(fd)
            os.close(fd)
        return None

    async def _wait(self) -> None:
        """Wait until there may be output, or the command has ended, or its linger time is over."""
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
