"""What a command prints, collected up to a cap without ever blocking the command for good."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

_CHUNK_BYTES = 1 << 16
_LINGER_S = 0.1
"""How long a finished command's children may still write to its output."""
_PAUSE_S = 0.005
"""Pause between reads of what is dropped, so that endless output costs the controller little."""


class Output:
    """One stream of a command."""

    def __init__(self, cap: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._cap = cap
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._fd, self._inside = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

    @property
    def inside(self) -> int:
        """The descriptor that the command writes to; `started` closes it here."""
        return self._inside

    @property
    def truncated(self) -> bool:
        """Whether output over the cap was dropped."""
        return self._size > self._cap

    def started(self) -> None:
        """Forget the command's end of the stream."""
        os.close(self._inside)
        self._inside = -1

    async def rest(self) -> bytes:
        """Return the whole output of a command that has ended, up to the cap."""
        while not self._ended.done() and self._read():
            pass
        if not self._ended.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), _LINGER_S)
        return b"".join(self._pieces)

    def close(self) -> None:
        """Let go of the stream."""
        if self._inside >= 0:
            self.started()
        self._end()

    def _read(self) -> bool:
        """Read what is there; return whether there may be more at once."""
        try:
            piece = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._end()
            return False
        if self._size < self._cap:
            self._pieces.append(piece[: self._cap - self._size])
        elif not self._ended.done():
            self._pause()
        self._size += len(piece)
        return self._size <= self._cap

    def _pause(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read)

    def _end(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if not self._ended.done():
            self._ended.set_result(None)
