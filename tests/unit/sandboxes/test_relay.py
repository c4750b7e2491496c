"""The relay: connections of a sandbox carried over its exec stream."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Chunk
from swerl.sandboxes import _relay, local
from swerl.sandboxes._relay import FrameKind, open_relay

from .helpers import LIMITS, WORKDIR

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
        self.run = sandbox.run
        self.cut = asyncio.Event()

    @asynccontextmanager
    async def start(self, argv: Sequence[str], **keywords: Any) -> AsyncIterator[_CutProcess]:
        async with self._sandbox.start(argv, **keywords) as process:
            yield _CutProcess(process, self.cut)


class _CutProcess:
    def __init__(self, process: Process, cut: asyncio.Event) -> None:
        self._process, self._cut = process, cut
        self.send, self.wait = process.send, process.wait

    async def output(self) -> AsyncIterator[Chunk]:
        async for chunk in self._process.output():
            if self._cut.is_set():
                message = "the stream broke"
                raise SandboxLostError(message)
            yield chunk


@pytest.fixture(params=["python3", "node"])
async def box(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Severed]:
    """A sandbox whose relay runs in either language, as if the image had no other."""
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    if request.param == "node":
        monkeypatch.setattr(_relay, "_BEGIN", _relay._BEGIN.replace("python3", "no-python"))
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


SLOW = """
slow = connect(); slow.sendall(b"G")  # asks for 8 MB and never reads
quick = connect(); quick.sendall(b"G"); print(len(quick.recv(10)))
"""


async def test_a_slow_reader_delays_no_other_connection(box: Severed) -> None:
    async with relayed(box, giver(bytes(8 << 20))) as (port, _):
        assert await python(box, SLOW, port) == "10\n"


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


async def lost(service: Service) -> SandboxLostError:
    async with asyncio.timeout(20):
        while not service.lost:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.01)
    return service.lost[0]


async def test_a_broken_stream_is_the_infrastructures_fault(box: Severed) -> None:
    async with relayed(box, echo) as (port, service):
        box.cut.set()
        await python(box, "connect()", port)
        error = await lost(service)
    assert "the stream broke" in str(error) and not error.from_inside


async def test_an_image_without_python_and_node_is_an_error(
    box: Severed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_relay, "_BEGIN", _relay._BEGIN.replace("command -v", "false"))
    with pytest.raises(SandboxError, match="neither python3 nor node") as caught:
        async with relayed(box, echo):
            pass
    assert "add one to the image" in caught.value.hint


INSIST = """
import time
for _ in range(100):
    try:
        s = connect(); s.sendall(b"hi")
        if s.recv(2): print("again"); break
    except OSError: pass
    time.sleep(0.05)
"""


async def end_program(box: Severed, signal: str) -> None:
    """Signal the program inside; its text is in its command line."""
    done = await box.run(
        ["pkill", f"-{signal}", "-f", "MAX_[C]ONNECTIONS"], user="root", timeout_s=20
    )
    assert done.exit_code == 0, done


async def test_a_killed_program_starts_again_on_its_port(box: Severed) -> None:
    async with relayed(box, echo) as (port, service):
        for _ in range(2):
            await end_program(box, "KILL")
            assert await python(box, INSIST, port) == "again\n"
        assert not service.lost


async def test_a_program_killed_again_and_again_is_a_lost_sandbox(
    box: Severed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_relay, "_MAX_RESTARTS", 0)
    async with relayed(box, echo) as (_, service):
        await end_program(box, "KILL")
        error = await lost(service)
    assert "again and again" in str(error)
    assert error.from_inside


async def test_a_stopped_program_is_the_fault_of_the_inside(
    box: Severed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_relay, "_SILENCE_S", 0.5)
    async with relayed(box, echo) as (port, service):
        await python(box, ASK, port)
        await end_program(box, "STOP")
        error = await lost(service)
    assert "silent" in str(error) and error.from_inside


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([(FrameKind.OPEN, number, b"") for number in range(1, 1000)], "more connections"),
        ([(FrameKind.OPEN, 2, b""), (FrameKind.OPEN, 2, b"")], "twice"),
        ([(FrameKind.OPEN, 1, b""), (FrameKind.DATA, 1, b"")], "no data"),
    ],
)
async def test_a_program_that_breaks_the_rules_is_refused(
    lines: list[tuple[FrameKind, int, bytes]], complaint: str
) -> None:
    listening = _relay.ListenerSocket()
    connections = _relay.RelayedConnections(listening)
    await connections.handle(FrameKind.DATA, 7, b"x")  # of a connection that has ended
    try:
        with pytest.raises(ValueError, match=complaint):
            for line in lines:
                await connections.handle(*line)
    finally:
        listening.close()
        await connections.close()
