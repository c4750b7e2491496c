"""What the tests of the E2B-compatible server share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from swerl.core.contracts import SandboxBackend
from swerl.core.sandbox import Limits
from swerl.sandboxes.e2b_server.app import SandboxServer
from swerl.sandboxes.e2b_server.served import ServerOptions

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
LIMITS = Limits(memory_mib=512, num_processes=128, disk_mib=512)


@dataclass(frozen=True, slots=True)
class Service:
    """A server that runs, and how to reach it."""

    url: str
    server: SandboxServer

    @property
    def sdk(self) -> dict[str, str]:
        """What the SDK's functions take."""
        return {"api_url": self.url, "sandbox_url": self.url, "api_key": KEY}

    def client(self, **headers: str) -> httpx.Client:
        """Return a plain HTTP client."""
        return httpx.Client(base_url=self.url, headers=headers, timeout=20)


@contextmanager
def serving(backend: SandboxBackend, **changes: object) -> Iterator[Service]:
    """Serve from a thread of its own, as blocking clients need it, until the block is left."""
    settings = {"port": 0, "templates": {"base": "host"}, "limits": LIMITS, **changes}
    options = ServerOptions(**settings)  # type: ignore[arg-type]
    ready: list[Service | BaseException] = []
    told, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with SandboxServer(backend, KEY, options) as server:
            ready.append(Service(server.url, server))
            told.set()
            await stop.wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # noqa: BLE001  the test's thread raises it
            ready.append(error)
        finally:
            told.set()

    thread = threading.Thread(target=run)
    thread.start()
    told.wait()
    try:
        if isinstance(ready[0], BaseException):
            raise ready[0]
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
    if len(ready) > 1 and isinstance(ready[1], BaseException):
        raise ready[1]


def eventually(true: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until a function returns something true."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if true():
            return
        pause.wait(0.02)
    raise AssertionError("it never happened")
