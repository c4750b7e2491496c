"""One Docker daemon: calls through the `docker` SDK in threads, streams on the event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from swerl.core.errors import (
    ImageError,
    SandboxError,
    SandboxUnavailableError,
    SwerlError,
    install_command,
)
from swerl.core.secrets import secret

Answer = TypeVar("Answer")

_LIMITS_HELD = {"memory": "MemoryLimit", "pids": "PidsLimit", "cpu": "CpuCfsQuota"}
"""Limit -> key of the daemon's info that is true if the daemon can enforce it."""
_THREADS = 16
_TIMEOUT_S = 120
_NO_DAEMON = "start it (`dockerd`), join the group that owns its socket, or set base_url"
_FORWARD = (
    "forward its socket: `ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST`, and set "
    "base_url = 'unix:///tmp/docker.sock'"
)
_HINTS = {
    "credentials store": "install the login helper of Docker's config, or set DOCKER_CONFIG",
    "no space left": "the daemon's disk is full: `docker system df`, then `docker system prune`",
    "/bin/sh": "swerl's containers need a /bin/sh; add one to the image",
    "unable to find user": "name a user of the image, or none for the image's own",
    "runtime": "`docker info` lists the runtimes that the daemon knows",
    "mount": "a mounted folder must exist where the daemon runs",
    "toomanyrequests": "the registry limits pulls: `docker login`, wait, or `swerl images mirror`",
    "many requests": "the registry limits pulls: `docker login`, wait, or `swerl images mirror`",
    "denied": "check the name; log in on the daemon's machine: `docker login REGISTRY`",
    "unauthorized": "check the name; log in on the daemon's machine: `docker login REGISTRY`",
    "manifest": "check the name, and its tag or digest",
    "not found": "check the name, and its tag or digest",
    "registry": "check that the daemon can reach the registry: `docker pull` prints details",
}
"""Words of the daemon's error -> hint."""
_STDERR = 2
_SLICE_BYTES = 1 << 18


class NameTakenError(SandboxError):
    """Another container has this name, or it is being removed."""


class ContainerGoneError(SandboxError):
    """The daemon has no such container."""


class Daemon:
    """The daemon at `base_url`; empty: the one that the `docker` command uses."""

    def __init__(self, base_url: str = "") -> None:
        self._base_url = base_url
        self._client: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="swerl-docker")
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self.info: dict[str, Any] = {}
        """The daemon's description of itself."""

    async def connect(self) -> None:
        """Connect to the daemon and read its info, once. Raises SandboxUnavailableError."""
        if not self.info:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._connect)

    @property
    def limits(self) -> set[str]:
        """The limits that the daemon enforces."""
        return {name for name, key in _LIMITS_HELD.items() if self.info.get(key)}

    async def call(self, request: Callable[[Any], Answer]) -> Answer:
        """Call the SDK's low-level client in a thread. Raises SandboxError or ImageError."""
        return await self.begin(request)

    def begin(self, request: Callable[[Any], Answer]) -> asyncio.Future[Answer]:
        """Start such a call; it runs to its end even if its caller is cancelled."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, self._call, request)

    async def stream(self, request: Callable[[Any], Any]) -> Stream:
        """Open a stream by a call of the SDK that returns a socket. Raises SandboxError."""
        sock, head = await self.call(lambda client: _own_socket(request(client)))
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        reader.feed_data(head)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
        return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def _connect(self) -> None:
        try:
            import docker
        except ImportError as error:
            raise SandboxUnavailableError(
                "the package `docker` is not installed", hint=install_command("docker")
            ) from error
        if self.info:
            return
        has_host, contexts = secret("DOCKER_HOST"), docker.ContextAPI
        chosen = docker.utils.kwargs_from_env if has_host else contexts.kwargs_from_context
        settings = {"base_url": self._base_url} if self._base_url else chosen()
        place = settings.get("base_url") or "the default socket"
        if place.startswith(("ssh:", "https:")) or settings.get("tls"):
            message = f"streams of the docker daemon cannot go through {place}"
            raise SandboxUnavailableError(message, hint=_FORWARD)
        try:
            client = docker.APIClient(
                **settings, version="auto", timeout=_TIMEOUT_S, max_pool_size=_THREADS
            )
            info = client.info()
        except (docker.errors.DockerException, OSError) as error:
            message = f"no docker daemon answers at {place}"
            raise SandboxUnavailableError(message, hint=_NO_DAEMON) from error
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
        except docker.errors.DockerException as error:  # such as a login helper that is missing
            raise _own_error(0, str(error)) from error
        except (requests.RequestException, OSError) as error:
            raise SandboxUnavailableError(
                "the docker daemon does not answer", hint=_NO_DAEMON
            ) from error


def hint_for(detail: str, default: str = "see the daemon's log") -> str:
    """Return the remedy for an error text of the daemon."""
    return next((hint for words, hint in _HINTS.items() if words in detail.lower()), default)


def _own_error(status: int, detail: str) -> SwerlError:
    message = f"docker: {detail.strip()[:300]}"
    if "invalid reference format" in detail:
        return ImageError(message, hint="name an image as `docker pull` takes it")
    kinds = {404: ContainerGoneError, 409: NameTakenError}
    return kinds.get(status, SandboxError)(message, hint=hint_for(detail))


def _own_socket(connection: Any) -> tuple[socket.socket, bytes]:
    """Return a copy of the SDK's socket, and the first output, which the SDK may have read.

    The SDK closes its own socket.
    """
    response = connection._response
    sock = socket.socket(fileno=os.dup(connection.fileno()))
    connection._sock.settimeout(0)
    head = response.raw._fp.fp.peek()
    response.close()
    sock.setblocking(False)
    return sock, head


class Stream:
    """A pipe to a process in a container."""

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
