"""A route from sandboxes to one port of this machine, like a cloud's route to a public URL."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.sandbox import Limits, Mount

PUBLIC_PORT = 8080
"""Port inside at which the test's public route begins."""
ROUTE = """
import socket, sys, threading
def carry(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError: a.close(); b.close()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while True:
    one, _ = server.accept()
    other = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    for pair in ((one, other), (other, one)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
"""


class Forward:
    """A listener that forwards every connection to a port of this machine, like a public URL."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def attach(self, sock: socket.socket) -> None:
        self.server = await asyncio.start_server(self._serve, sock=sock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(_carry(reader, out_writer), _carry(out_reader, writer))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        return
    finally:
        writer.close()


class WithRoute:
    """A backend whose sandboxes can reach one port of this machine, as a cloud's reach a URL."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self.live, self.remove, self.price = backend.live, backend.remove, backend.price
        self.port = 0

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        opened = self._backend.open(image, limits, workdir=workdir, mounts=mounts, name=name)
        async with opened as sandbox:
            if not self.port:
                yield sandbox
                return
            url = await sandbox.expose(Forward(self.port))
            ports = (str(PUBLIC_PORT), url.rpartition(":")[2])
            async with sandbox.start(["python3", "-c", ROUTE, *ports], user="root") as route:
                await anext(route.output())
                yield sandbox
