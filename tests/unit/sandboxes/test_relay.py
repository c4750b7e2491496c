"""The relay: connections of a sandbox carried over its exec stream."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Chunk, Exec
from swerl.sandboxes import _relay, local
from swerl.sandboxes._relay import open_relay

from .helpers import LIMITS, WORKDIR, sh

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class Service:
    """A listener that talks with every connection."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.lost: list[SandboxLostError] = []

    async def attach(self, sock: socket.socket) -> None:
        self.server = await asyncio.start_server(self._serve, sock=sock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(reader, writer)
        except ConnectionError:
            return
        finally:
            writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


class Severed:
    """A sandbox whose exec streams the test can cut, like a provider that drops a connection."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.id = sandbox.id
        self.streams: list[asyncio.Event] = []
        self.refuses = False

    async def run(self, argv: Sequence[str], **keywords: Any) -> Exec:
        return await self._sandbox.run(argv, **keywords)

    @asynccontextmanager
    async def start(self, argv: Sequence[str], **keywords: Any) -> AsyncIterator[_CutProcess]:
        if self.refuses:
            message = "no stream today"
            raise SandboxError(message)
        cut = asyncio.Event()
        self.streams.append(cut)
        async with self._sandbox.start(argv, **keywords) as process:
            yield _CutProcess(process, cut)

    def cut(self) -> None:
        self.streams[-1].set()


class _CutProcess:
    def __init__(self, process: Process, cut: asyncio.Event) -> None:
        self._process, self._cut = process, cut
        self.wait, self.signal, self.end_input = process.wait, process.signal, process.end_input

    async def send(self, data: bytes) -> None:
        if self._cut.is_set():
            message = "the stream broke"
            raise SandboxError(message)
        await self._process.send(data)

    async def output(self) -> AsyncIterator[Chunk]:
        async for chunk in self._process.output():
            if self._cut.is_set():
                message = "the stream broke"
                raise SandboxError(message)
            yield chunk


@pytest.fixture(params=["python3", "perl"])
async def box(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Severed]:
    """A sandbox whose relay runs in either language, as if the image had no other."""
    other = {"python3": "perl", "perl": "python3"}[request.param]
    monkeypatch.setattr(_relay, "_BEGIN", _relay._BEGIN.replace(f"command -v {other}", "false"))
    try:
        async with local.build(local.Options()).open("host", LIMITS, workdir=WORKDIR) as opened:
            yield Severed(opened)
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")


@asynccontextmanager
async def relayed(sandbox: Severed, talk: Talk) -> AsyncIterator[tuple[str, Service]]:
    service = Service(talk)
    async with open_relay(sandbox, service, on_lost=service.lost.append) as url:  # type: ignore[arg-type]
        yield url.rpartition(":")[2], service
        service.server.close()


async def python(sandbox: Severed, program: str, port: str, *more: str) -> str:
    head = "import sys, socket, hashlib; connect = lambda: "
    head += "socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20)\n"
    done = await sandbox.run(["python3", "-c", head + program, port, *more], timeout_s=30)
    assert done.exit_code == 0, done
    return done.stdout.decode()


FETCH = """
s = connect(); s.sendall(b"G"); got = bytearray()
while piece := s.recv(65536): got += piece
print(hashlib.sha256(got).hexdigest(), len(got))
"""
SEND = """
s = connect(); data = bytes(range(256)) * 40960
s.sendall(data); s.shutdown(socket.SHUT_WR); got = bytearray()
while piece := s.recv(65536): got += piece
print(got.decode())
"""


async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await reader.read(-1)
    writer.write(f"{hashlib.sha256(data).hexdigest()} {len(data)}".encode())


def giver(data: bytes) -> Talk:
    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(data)
        await writer.drain()

    return give


async def test_ten_megabytes_arrive_whole_in_both_directions(box: Severed) -> None:
    data = os.urandom(10 << 20)
    async with relayed(box, giver(data)) as (port, _):
        assert await python(box, FETCH, port) == f"{hashlib.sha256(data).hexdigest()} {10 << 20}\n"
    sent = bytes(range(256)) * 40960
    async with relayed(box, count) as (port, _):
        assert await python(box, SEND, port) == f"{hashlib.sha256(sent).hexdigest()} {len(sent)}\n"


MANY = """
import threading
def one(n, out):
    s = connect(); text = (str(n) * 50000).encode(); s.sendall(text); s.shutdown(socket.SHUT_WR)
    got = bytearray()
    while piece := s.recv(65536): got += piece
    out.append(got == text)
out = []; all = [threading.Thread(target=one, args=(n, out)) for n in range(40)]
[t.start() for t in all]; [t.join() for t in all]
print(sum(out))
"""


async def test_many_connections_at_once_do_not_mix(box: Severed) -> None:
    async with relayed(box, echo) as (port, _):
        assert await python(box, MANY, port) == "40\n"


SLOW = """
slow = connect(); slow.sendall(b"G")  # asks for 8 MB and never reads
quick = connect(); quick.sendall(b"G"); print(len(quick.recv(10)))
"""


async def test_a_slow_reader_delays_no_other_connection_and_its_buffer_is_bounded(
    box: Severed,
) -> None:
    written = [0]

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for _ in range(128):
            writer.write(bytes(1 << 16))
            await writer.drain()
            written[0] += 1 << 16

    async with relayed(box, give) as (port, _):
        assert await python(box, SLOW, port) == "10\n"
        assert written[0] < 6 << 20


RESET = """
import struct
s = connect(); s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
s.sendall(b"x"); s.recv(1); s.close()
"""


async def test_a_reset_inside_ends_the_connection_outside(box: Severed) -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1))
        await reader.read(1)
        ended.set()

    async with relayed(box, talk) as (port, _):
        await python(box, RESET, port)
        async with asyncio.timeout(5):
            await ended.wait()


ASK = """
try: s = connect(); s.sendall(b"x"); print(s.recv(1))
except OSError: print("reset")
"""


async def test_a_closed_listener_resets_connections(box: Severed) -> None:
    async with relayed(box, echo) as (port, service):
        service.server.close()
        await asyncio.sleep(0)
        assert await python(box, ASK, port) in ("reset\n", "b''\n")


async def test_a_broken_stream_loses_and_repeats_nothing(box: Severed) -> None:
    data = os.urandom(6 << 20)

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for start in range(0, len(data), 1 << 20):
            writer.write(data[start : start + (1 << 20)])
            await writer.drain()
            box.cut()

    async with relayed(box, give) as (port, service):
        assert await python(box, FETCH, port) == f"{hashlib.sha256(data).hexdigest()} {len(data)}\n"
    assert len(box.streams) > 3
    assert not service.lost


async def test_an_image_without_python_and_perl_is_an_error(
    box: Severed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_relay, "_BEGIN", _relay._BEGIN.replace("command -v", "false"))
    with pytest.raises(SandboxError, match="neither python3 nor perl") as caught:
        async with relayed(box, echo):
            pass
    assert "public" in caught.value.hint


async def test_a_stream_that_stops_reading_is_replaced(box: Severed) -> None:
    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        box.cut()  # the courier says nothing of its own: only what is sent to it can fail
        writer.write(bytes(100_000))
        await writer.drain()

    digest = hashlib.sha256(bytes(100_000)).hexdigest()
    async with relayed(box, give) as (port, _):
        assert await python(box, FETCH, port) == f"{digest} 100000\n"
    assert len(box.streams) > 1


INSIST = """
import time
for _ in range(100):
    try:
        s = connect(); s.sendall(b"hi")
        if s.recv(2): print("again"); break
    except OSError: pass
    time.sleep(0.05)
"""


async def test_a_killed_server_restarts_on_its_port(box: Severed) -> None:
    async with relayed(box, echo) as (port, service):
        for _ in range(2):
            await sh(box, "pkill -9 -f 'swerl-relay-[0-9a-f]'; :", user="root")  # type: ignore[arg-type]
            assert await python(box, INSIST, port) == "again\n"
        assert not service.lost


async def test_a_server_killed_again_and_again_is_a_lost_sandbox(
    box: Severed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_relay, "_MAX_RESTARTS", 0)
    async with relayed(box, echo) as (_, service):
        await sh(box, "pkill -9 -f 'swerl-relay-[0-9a-f]'; :", user="root")  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            while not service.lost:  # noqa: ASYNC110  there is no event
                await asyncio.sleep(0.01)
    assert "again and again" in str(service.lost[0])
    assert service.lost[0].from_inside
