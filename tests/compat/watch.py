"""Watch an agent: count its HTTP requests, and record its attempts to reach outside."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from swerl.core.contracts import Listener, Process, Sandbox
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec

_REQUEST = re.compile(
    rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS) (/[^ ?\r\n]*)[^ \r\n]* HTTP/1\.[01]\r\n"
)
"""The first line of a request; a JSON body holds no such line end."""
_LONGEST = 8192
"""Earlier bytes to keep, for a first line that arrives in two pieces."""
_CHUNK = 65536
_LOCAL = "127.0.0.1"
_PROGRAM = "/var/lib/swerl-compat/outside.py"
_LOG = "/var/lib/swerl-compat/outside.log"
_NSSWITCH = "/etc/nsswitch.conf"
_USE_DNS = b"passwd: files\ngroup: files\nhosts: files dns\n"
"""With `files` alone, glibc would send no DNS query for a name, and no lookup would be seen."""


class CountingProxy:
    """Pass bytes between a Session and its clients, and count requests. Implements Listener."""

    def __init__(self, port: int) -> None:
        self.requests: Counter[str] = Counter()
        """`METHOD /path` -> number of requests."""
        self._port = port
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, sock: socket.socket) -> None:
        """Accept connections from this listening socket, and own it, until closed."""
        sock.setblocking(False)
        self._servers.append(await asyncio.start_server(self._serve, sock=sock))

    async def listen(self) -> str:
        """Listen on this machine and return the base URL."""
        sock = _listening()
        await self.attach(sock)
        return f"http://{_LOCAL}:{sock.getsockname()[1]}"

    async def close(self) -> None:
        """Accept no more connections, and end the open ones."""
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
            server_reader, server_writer = await asyncio.open_connection(_LOCAL, self._port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_requests(reader, server_writer))
                    group.create_task(_pass(server_reader, writer))
            finally:
                server_writer.close()
                writer.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        seen = b""
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                seen = self._count(seen + data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _count(self, seen: bytes) -> bytes:
        """Count the first lines in these bytes; return the bytes that may begin another one."""
        end = 0
        for found in _REQUEST.finditer(seen):
            self.requests[f"{found[1].decode()} {found[2].decode(errors='replace')}"] += 1
            end = found.end()
        return seen[max(end, len(seen) - _LONGEST) :]


@asynccontextmanager
async def proxy_to(session: Listener) -> AsyncIterator[CountingProxy]:
    """Open a proxy in front of a Session."""
    sock = _listening()
    port = sock.getsockname()[1]
    await session.attach(sock)
    proxy = CountingProxy(port)
    try:
        yield proxy
    finally:
        await proxy.close()


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


class WatchedSandbox:
    """Run each command of a Sandbox under `outside.py`. Implements Sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def id(self) -> str:
        return self._sandbox.id

    async def prepare(self) -> None:
        """Install the program that watches. Raises SandboxError if it cannot run."""
        await self._sandbox.write(_PROGRAM, _source())
        await self._sandbox.write(_NSSWITCH, _USE_DNS)
        tried = await self.run(["true"], timeout_s=60)
        if tried.exit_code:
            raise SandboxError(
                f"connections cannot be watched: {tried.text.strip()[-200:]}",
                hint="the sandbox needs Linux 5.9 and Python 3",
            )

    async def attempts(self) -> tuple[str, ...]:
        """Return the names looked up and the addresses dialled outside, each once, in order."""
        log = (await self._sandbox.read(_LOG)).decode()
        return tuple(dict.fromkeys(log.splitlines()))

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Exec:
        return await self._sandbox.run(
            _under_watch(argv), cwd=cwd, env=env, user=user, timeout_s=timeout_s, stdin=stdin
        )

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        return self._sandbox.start(_under_watch(argv), cwd=cwd, env=env, user=user)

    async def read(self, path: str) -> bytes:
        return await self._sandbox.read(path)

    async def write(self, path: str, data: bytes) -> None:
        await self._sandbox.write(path, data)

    async def expose(self, listener: Listener) -> str:
        return await self._sandbox.expose(listener)


def _under_watch(argv: Sequence[str]) -> list[str]:
    return ["python3", "-I", "-S", _PROGRAM, _LOG, *argv]


def _source() -> bytes:
    return Path(__file__).with_name("outside.py").read_bytes()
