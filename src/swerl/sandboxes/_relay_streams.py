"""The controller's half of a relay's connections: each is joined to one listener, and to no more.

Either side of a connection sends at most WINDOW bytes more than the other has passed on, so a slow
reader holds up nobody else and bounds what is kept for it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swerl.core.contracts import Listener
from swerl.sandboxes._relay_wire import Frame, Kind

WINDOW = 1 << 19
"""Bytes under way in one direction of a connection; the half inside has the same number."""
MAX_CONNECTIONS = 128
"""Connections at once; the half inside accepts no more."""
_CHUNK = 24 * 1024
_BACKLOG = 256


class Door:
    """A unix socket that a listener serves and only this object can reach.

    Its name is removed before anybody could use it; the descriptor that stays leads there.
    """

    def __init__(self) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with tempfile.TemporaryDirectory(prefix="swerl-") as folder:
            path = str(Path(folder) / "s")
            self._listening.bind(path)
            self._listening.listen(_BACKLOG)
            self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC)

    async def give_to(self, listener: Listener) -> None:
        """Let the listener serve it."""
        await listener.attach(self._listening)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection. Raises OSError where nobody listens any more."""
        return await asyncio.open_unix_connection(f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        """Let nobody in any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Streams:
    """Every open connection of one relay."""

    def __init__(self, door: Door, push: Callable[[Frame], None]) -> None:
        self._door = door
        self._push = push
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        """The latest connection's number; each is higher than all before it."""

    def obey(self, frame: Frame) -> None:
        """Do what a frame from inside says. Raises ValueError on one that breaks the rules."""
        if frame.kind is Kind.OPEN:
            if len(self._streams) > 2 * MAX_CONNECTIONS:  # some may be about to end
                raise ValueError("the relay opens more connections than it may")
            if frame.connection <= self._last:  # another of that name would be lost sight of
                raise ValueError("the relay opens a connection twice")
            self._last = frame.connection
            opened = _Stream(frame.connection, self._push)
            self._streams[frame.connection] = opened
            opened.task = asyncio.ensure_future(opened.run(self._door))
            opened.task.add_done_callback(lambda _: self._streams.pop(frame.connection, None))
        elif stream := self._streams.get(frame.connection):
            stream.obey(frame)

    async def close(self) -> None:
        """End every connection; those to come are numbered anew."""
        self._last = 0
        tasks = [stream.task for stream in self._streams.values() if stream.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Stream:
    """One connection between a program in the sandbox and the listener."""

    def __init__(self, number: int, push: Callable[[Frame], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._number = number
        self._push = push
        self._credit = WINDOW
        self._more_credit = asyncio.Event()
        self._inbound: asyncio.Queue[bytes] = asyncio.Queue()
        self._inbound_size = 0
        self._inbound_ended = False

    def obey(self, frame: Frame) -> None:
        if frame.kind in (Kind.DATA, Kind.END):
            if self._inbound_ended:
                raise ValueError("the relay goes on after an end")
            self._inbound_ended = frame.kind is Kind.END or not frame.payload
        match frame.kind:
            case Kind.DATA:
                data = base64.b64decode(frame.payload, validate=True)
                self._inbound_size += len(data)
                if self._inbound_size > WINDOW:
                    raise ValueError("the relay sends more than it may")
                self._inbound.put_nowait(data)
            case Kind.END:
                self._inbound.put_nowait(b"")
            case Kind.WINDOW:
                self._credit += int(frame.payload)
                if self._credit > WINDOW:
                    raise ValueError("the relay passed on more than it was given")
                self._more_credit.set()
            case _:
                if self.task:
                    self.task.cancel()

    async def run(self, door: Door) -> None:
        """Carry both directions to their ends."""
        writer = None
        try:
            reader, writer = await door.connect()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._inward(writer))
                group.create_task(self._outward(reader))
        except* OSError:
            self._say(Kind.RESET)
        finally:
            if writer:
                writer.close()

    async def _inward(self, writer: asyncio.StreamWriter) -> None:
        """Pass on what the program says."""
        while data := await self._inbound.get():
            writer.write(data)
            await writer.drain()
            self._inbound_size -= len(data)
            self._say(Kind.WINDOW, str(len(data)))
        with suppress(OSError):  # the listener may have answered and gone
            writer.write_eof()

    async def _outward(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the listener answers."""
        while True:
            while self._credit <= 0:
                self._more_credit.clear()
                await self._more_credit.wait()
            data = await reader.read(min(_CHUNK, self._credit))
            if not data:
                self._say(Kind.END)
                return
            self._credit -= len(data)
            self._say(Kind.DATA, base64.b64encode(data).decode())

    def _say(self, kind: Kind, payload: str = "") -> None:
        self._push(Frame(kind, self._number, payload))
