"""Streams of the Docker API: an HTTP request whose connection turns into a pipe to a process.

The SDK reads such a connection through a buffer that may swallow its first bytes, and blocks; so
these are spoken here, on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from swerl.core.chat import Json
from swerl.core.errors import SandboxError

_STDERR = 2
_CONNECT_S = 30.0
_SLICE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon listens: a Unix socket's path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0


class StreamRefusedError(SandboxError):
    """The daemon answered a request for a stream with an error."""


class Stream:
    """A pipe to a process in a container."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> tuple[bytes, bool] | None:
        """Return what it printed next and whether that is stderr; None at the end."""
        try:
            kind, size = struct.unpack(">B3xI", await self._reader.readexactly(8))
            return await self._reader.readexactly(size), kind == _STDERR
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def send(self, data: bytes) -> None:
        """Write to its input. Raises ConnectionError when that is closed."""
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            self._writer.write(view[start : start + _SLICE_BYTES])
            await self._writer.drain()

    def end_input(self) -> None:
        """Close its input."""
        with suppress(OSError):
            self._writer.write_eof()

    def close(self) -> None:
        """Let go of the connection."""
        self._writer.close()


async def open_stream(
    address: Address, path: str, body: Mapping[str, Json] | None = None
) -> Stream:
    """Ask for a stream. Raises StreamRefusedError, or OSError when the daemon is away.

    Nothing is sent where there is no body: Podman would pass it on to the process.
    """
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await _connect(address)
        try:
            data = json.dumps(body).encode() if body else b""
            head = f"POST {path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            head += f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await _require_stream(reader)
        except BaseException:
            writer.close()
            raise
    return Stream(reader, writer)


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.path:
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.host, address.port)


async def _require_stream(reader: asyncio.StreamReader) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the daemon closed the connection") from error
    status = int(head.split(" ", 2)[1])
    if status in (101, 200):
        return
    said = (await reader.read(1 << 16)).decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        said = json.loads(said[said.index("{") : said.rindex("}") + 1])["message"]
    raise StreamRefusedError(
        f"the docker daemon answers {status}: {said.strip()[:300]}",
        hint="the daemon's log may say more",
    )
