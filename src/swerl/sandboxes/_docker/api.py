"""The Docker daemon's API through the `docker` SDK, off the event loop, with errors of our own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from swerl.core.errors import ImageError, SandboxError, SandboxUnavailableError, SwerlError
from swerl.sandboxes._docker.hijack import Address

Answer = TypeVar("Answer")

LIMITS_HELD = {"memory": "MemoryLimit", "pids": "PidsLimit", "cpu": "CpuCfsQuota"}
"""Limit -> what a daemon that can hold it says of itself."""
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
"""Words of the daemon's -> what to do about it."""
_NO_HINT = "the daemon's log may say more"


class NameTakenError(SandboxError):
    """Another container has this name."""


class ContainerGoneError(SandboxError):
    """The daemon knows no such container."""


class Api:
    """One daemon."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._client: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="swerl-docker")
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self.address = Address()
        self.info: dict[str, Any] = {}
        """What the daemon says of itself."""
        self.is_podman = False

    async def connect(self) -> None:
        """Find the daemon and learn about it, once. Raises SandboxUnavailableError."""
        if not self.info:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._connect)

    async def call(self, request: Callable[[Any], Answer]) -> Answer:
        """Call the SDK's low-level client in a thread. Raises SandboxError or ImageError."""
        return await self.begin(request)

    def begin(self, request: Callable[[Any], Answer]) -> asyncio.Future[Answer]:
        """Start such a call; it goes on to its end even where nobody waits any more."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, self._call, request)

    def path(self, rest: str) -> str:
        """Return the path of a request that the SDK does not make."""
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
            info, parts = client.info(), client.version().get("Components") or ()
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxUnavailableError(
                f"no docker daemon answers at {settings.get('base_url', 'the default socket')}",
                hint=_NO_DAEMON,
            ) from error
        self.address = _address(client.base_url, settings.get("base_url") or "")
        self.is_podman = any("Podman" in part.get("Name", "") for part in parts)
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


def _own_error(status: int, said: str) -> SwerlError:
    hint = next((hint for words, hint in _HINTS.items() if words in said.lower()), _NO_HINT)
    message = f"docker: {said.strip()[:300]}"
    if "invalid reference format" in said:
        return ImageError(message, hint="name an image as `docker pull` takes it")
    kinds = {_NOT_FOUND: ContainerGoneError, _CONFLICT: NameTakenError}
    return kinds.get(status, SandboxError)(message, hint=hint)


def _address(client_url: str, given: str) -> Address:
    """Return where to open streams; the SDK hides a Unix socket's path behind a fixed URL."""
    parts = urlsplit(given or "unix:///var/run/docker.sock")
    if parts.scheme in ("unix", "http+unix"):
        return Address(path=parts.path or "/var/run/docker.sock")
    if parts.scheme in ("tcp", "http") and client_url.startswith("http://"):
        return Address(host=parts.hostname or "127.0.0.1", port=parts.port or 2375)
    message = f"cannot stream through {given}"
    hint = "forward its socket: `ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST`, and set "
    raise SandboxUnavailableError(message, hint=hint + "base_url = 'unix:///tmp/docker.sock'")
