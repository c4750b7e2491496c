"""The Docker daemon's API: calls through the `docker` SDK in threads, streams without it.

A stream is an HTTP request whose connection becomes a pipe to a process. The SDK blocks, and reads
such a connection through a buffer that can lose its first bytes; so streams are opened here, on the
event loop. All errors are swerl's own.
"""

from __future__ import annotations

import asyncio
import json
import struct
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from swerl.core.chat import Json
from swerl.core.errors import ImageError, SandboxError, SandboxUnavailableError, SwerlError

Answer = TypeVar("Answer")

_LIMITS_HELD = {"memory": "MemoryLimit", "pids": "PidsLimit", "cpu": "CpuCfsQuota"}
"""Limit -> key of the daemon's info that is true if the daemon can enforce it."""
_THREADS = 16
_TIMEOUT_S = 120
_NO_DAEMON = "start it (`dockerd`), join the group that owns its socket, or set base_url"
_NOT_FOUND, _CONFLICT = 404, 409
_HINTS = {
    "no space left": "the daemon's disk is full: `docker system df`, then `docker system prune`",
    "/bin/sh": "swerl's containers need a /bin/sh; add one to the image",
    "unable to find user": "name a user of the image, or none for the image's own",
    "runtime": "`docker info` lists the runtimes that the daemon knows",
    "mount": "a mounted folder must exist where the daemon runs",
}
"""Words of the daemon's error -> hint."""
_NO_HINT = "see the daemon's log"
_STDERR = 2
_CONNECT_S = 30.0
_SLICE_BYTES = 1 << 18


class NameTakenError(SandboxError):
    """Another container has this name."""


class ContainerGoneError(SandboxError):
    """The daemon has no such container."""


class Api:
    """One daemon."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._client: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="swerl-docker")
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self.address = DaemonAddress()
        self.info: dict[str, Any] = {}
        """The daemon's description of itself."""

    async def connect(self) -> None:
        """Connect to the daemon and read its info, once. Raises SandboxUnavailableError."""
        if not self.info:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._connect)

    async def call(self, request: Callable[[Any], Answer]) -> Answer:
        """Call the SDK's low-level client in a thread. Raises SandboxError or ImageError."""
        return await self.begin(request)

    def begin(self, request: Callable[[Any], Answer]) -> asyncio.Future[Answer]:
        """Start such a call; it runs to its end even if its caller is cancelled."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, self._call, request)

    def path(self, rest: str) -> str:
        return f"/v{self._client.api_version}{rest}"

    def _connect(self) -> None:
        try:
            import docker
        except ImportError as error:
            raise SandboxUnavailableError(
                "the package `docker` is not installed", hint="pip install 'swerl[docker]'"
            ) from error
        if self.info:
            return
        settings = (
            {"base_url": self._base_url} if self._base_url else docker.utils.kwargs_from_env()
        )
        try:
            client = docker.APIClient(
                **settings, version="auto", timeout=_TIMEOUT_S, max_pool_size=_THREADS
            )
            info = client.info()
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxUnavailableError(
                f"no docker daemon answers at {settings.get('base_url', 'the default socket')}",
                hint=_NO_DAEMON,
            ) from error
        self.address = _address(client.base_url, settings.get("base_url") or "")
        self._client, self.info = client, info
        weakref.finalize(self, client.close)

    def _call(self, request: Callable[[Any], Answer]) -> Answer:
        import docker.errors
        import requests

        try:
            return request(self._client)
        except docker.errors.ImageNotFound as error:
            raise ImageError(error.explanation or str(error)) from error
        except docker.errors.APIError as error:
            raise _own_error(error.status_code, error.explanation or str(error)) from error
        except (requests.RequestException, OSError) as error:
            raise SandboxUnavailableError(
                "the docker daemon does not answer", hint=_NO_DAEMON
            ) from error


def limits_held(info: Mapping[str, Any]) -> set[str]:
    """Return the limits that a daemon with this info enforces."""
    return {name for name, key in _LIMITS_HELD.items() if info.get(key)}


def _own_error(status: int, detail: str) -> SwerlError:
    hint = next((hint for words, hint in _HINTS.items() if words in detail.lower()), _NO_HINT)
    message = f"docker: {detail.strip()[:300]}"
    if "invalid reference format" in detail:
        return ImageError(message, hint="name an image as `docker pull` takes it")
    kinds = {_NOT_FOUND: ContainerGoneError, _CONFLICT: NameTakenError}
    return kinds.get(status, SandboxError)(message, hint=hint)


def _address(client_url: str, given: str) -> DaemonAddress:
    """Return the address for streams; the SDK hides a Unix socket's path behind a fixed URL."""
    parts = urlsplit(given or "unix:///var/run/docker.sock")
    if parts.scheme in ("unix", "http+unix"):
        return DaemonAddress(path=parts.path or "/var/run/docker.sock")
    if parts.scheme in ("tcp", "http") and client_url.startswith("http://"):
        return DaemonAddress(host=parts.hostname or "127.0.0.1", port=parts.port or 2375)
    message = f"streams of the docker daemon cannot go through {given}"
    hint = "forward its socket: `ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST`, and set "
    raise SandboxUnavailableError(message, hint=hint + "base_url = 'unix:///tmp/docker.sock'")


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """A daemon's Unix socket path, or its host and port."""

    path: str = ""
    host: str = ""
    port: int = 0


class StreamRefusedError(SandboxError):
    """The daemon answered a request for a stream with an error."""


class ExecStream(Protocol):
    """A pipe to a process in a container or pod."""

    async def read(self) -> tuple[bytes, bool] | None:
        """Return the next piece of output, and whether it is stderr; None at the end."""

    async def send(self, data: bytes) -> None:
        """Write to its input. Raises ConnectionError if that is closed."""

    def end_input(self) -> None: ...

    def close(self) -> None: ...


class Stream:
    """An ExecStream of the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> tuple[bytes, bool] | None:
        try:
            kind, size = struct.unpack(">B3xI", await self._reader.readexactly(8))
            return await self._reader.readexactly(size), kind == _STDERR
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            self._writer.write(view[start : start + _SLICE_BYTES])
            await self._writer.drain()

    def end_input(self) -> None:
        with suppress(OSError):
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


async def open_stream(
    address: DaemonAddress, path: str, body: Mapping[str, Json] | None = None
) -> Stream:
    """Open a stream. Raises StreamRefusedError, or OSError if the daemon does not answer."""
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


async def _connect(address: DaemonAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
    detail = (await reader.read(1 << 16)).decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        detail = json.loads(detail[detail.index("{") : detail.rindex("}") + 1])["message"]
    raise StreamRefusedError(
        f"the docker daemon answers {status}: {detail.strip()[:300]}", hint=_NO_HINT
    )
