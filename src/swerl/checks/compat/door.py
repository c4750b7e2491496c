"""A door in front of a Session: passes every byte on, and counts the HTTP requests."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from swerl.core.contracts import Listener

_REQUEST = re.compile(
    rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS) (/[^ ?\r\n]*)[^ \r\n]* HTTP/1\.[01]\r\n"
)
"""The first line of a request: a JSON body holds no line end of this kind."""
_LONGEST = 8192
"""Bytes kept of what came before, for a first line that arrives in two pieces."""
_CHUNK = 65536
_LOCAL = "127.0.0.1"


class Door:
    """Implements Listener: serves a Session's clients from a socket that the Session serves."""

    def __init__(self, port: int) -> None:
        self.requests: Counter[str] = Counter()
        """`METHOD /path` -> how often it was asked for."""
        self._port = port
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        """Return the requests of all kinds."""
        return self.requests.total()

    async def attach(self, sock: socket.socket) -> None:
        """Accept connections from this listening socket until closed. Takes the socket over."""
        sock.setblocking(False)
        self._servers.append(await asyncio.start_server(self._serve, sock=sock))

    async def listen(self) -> str:
        """Open the door on this machine and return its base URL."""
        sock = _listening()
        await self.attach(sock)
        return f"http://{_LOCAL}:{sock.getsockname()[1]}"

    async def close(self) -> None:
        """Take no connection any more and end those that are left."""
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(OSError):
            behind, before = await asyncio.open_connection(_LOCAL, self._port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_requests(reader, before))
                    group.create_task(_pass(behind, writer))
            finally:
                before.close()
                writer.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass a client's bytes on, counting."""
        seen = b""
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                seen = self._count(seen + data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _count(self, seen: bytes) -> bytes:
        """Count the first lines in these bytes and return those that are to be seen again."""
        end = 0
        for found in _REQUEST.finditer(seen):
            self.requests[f"{found[1].decode()} {found[2].decode(errors='replace')}"] += 1
            end = found.end()
        return seen[max(end, len(seen) - _LONGEST) :]


@asynccontextmanager
async def door_to(session: Listener) -> AsyncIterator[Door]:
    """Open a door to a session."""
    sock = _listening()
    port = sock.getsockname()[1]
    await session.attach(sock)
    door = Door(port)
    try:
        yield door
    finally:
        await door.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


def _listening() -> socket.socket:
    sock = socket.socket()
    sock.bind((_LOCAL, 0))
    sock.listen()
    return sock
