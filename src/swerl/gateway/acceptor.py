"""Acceptor: takes connections to one address and hands each to the process that serves its key.

It reads a connection up to the end of its first request's head, where the key stands. A process
answers that one request and says that the connection ends with it, so the next request is looked at
anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from multidict import CIMultiDict

from swerl.gateway.orders import MOST_FIRST_BYTES

HEAD_S = 30.0
"""Seconds for a head to arrive."""
_MOST_READING = 8192
"""Connections whose head is awaited; more are closed at once."""
_PAUSE_S = 0.1
"""Seconds to wait where the machine has no descriptor left for a connection."""


class _Target(Protocol):
    def hand_over(self, connection: socket.socket, first: bytes) -> None: ...


FindTarget: TypeAlias = Callable[[str, Mapping[str, str]], _Target]
"""Request target and headers -> who serves them."""


class Acceptor:
    """Serves one listening socket between `start` and `stop`."""

    def __init__(self, listening: socket.socket, find: FindTarget) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._find = find
        self._accepting: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to accept."""
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Accept no more and drop the connections that were not handed over."""
        tasks = [*self._reading, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._reading) >= _MOST_READING:
                connection.close()
                continue
            task = asyncio.create_task(self._pass_on(connection))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _pass_on(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                first = await _read_head(connection)
        except OSError:
            first = b""
        except asyncio.CancelledError:
            connection.close()
            raise
        if not first:
            connection.close()
            return
        target, headers = _parse(first)
        self._find(target, headers).hand_over(connection, first)


async def _read_head(connection: socket.socket) -> bytes:
    """Return what was read to the end of the head, or all that may be read; empty at an end."""
    loop, read = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in read and b"\n\n" not in read and len(read) < MOST_FIRST_BYTES:
        more = await loop.sock_recv(connection, MOST_FIRST_BYTES - len(read))
        if not more:
            return b""
        read += more
    return read


def _parse(first: bytes) -> tuple[str, Mapping[str, str]]:
    """Return the target and headers; whoever serves the request judges whether they are right."""
    lines = first.partition(b"\r\n\r\n")[0].decode("latin-1").splitlines()
    words = lines[0].split() if lines else []
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers.add(name.strip(), value.strip())
    return (words[1] if len(words) > 1 else "/"), headers
