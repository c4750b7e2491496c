"""Make a listener reachable from a sandbox without a network, over a command's streams.

A small program inside listens on the sandbox's loopback (`_relay_inside.py`, or `_relay_inside.js`
where the image has no Python). Its input and output carry its connections to the controller, which
connects each to one listener and to nothing else. If the stream breaks, the sandbox is lost to the
infrastructure and the Episode is run again. If the program is killed, it is started again on its
port a few times; then the sandbox is lost by its own fault.

Both sides exchange lines `<kind> <connection> <payload>`, in ASCII, because some providers carry
streams as text. The program prints `S <port>` when it listens, and `P` as a sign of life.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from swerl.core.contracts import Listener, Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk

_NO_PROGRAM = 96
_BEGIN = f"""
python=$1 node=$2 port=$3; cd /
for program in python3 /opt/swerl/agents/python/bin/python3; do
    command -v "$program" >/dev/null 2>&1 && exec "$program" -I -S -c "$python" "$port"
done
for program in node /opt/swerl/agents/node/bin/node; do
    command -v "$program" >/dev/null 2>&1 && exec "$program" -e "$node" "$port"
done
exit {_NO_PROGRAM}
"""
_START_TIMEOUT_S = 30.0
_SILENCE_S = 60.0
"""A program that prints nothing for this time, not even its sign of life, is lost."""
_END_TIMEOUT_S = 10.0
_MAX_RESTARTS = 5
_MAX_DETAIL = 300
"""Largest length of an error text from inside."""
_MAX_CONNECTIONS = 256
"""Connections at once; the program accepts half as many, and others may be about to end."""
_CHUNK = 24 * 1024
_BACKLOG = 256
_BATCH_BYTES = 1 << 17
_MAX_WAITING_BYTES = 1 << 20
"""Bytes that wait for the stream, or for the listener of one connection, before reading stops."""
_MAX_LINE_BYTES = 1 << 16


@asynccontextmanager
async def open_relay(
    sandbox: Sandbox, listener: Listener, *, on_lost: Callable[[SandboxLostError], None]
) -> AsyncIterator[str]:
    """Make `listener` reachable from inside the sandbox and yield its base URL there.

    `on_lost` is called once if the relay fails permanently. Raises SandboxError if neither the
    image nor the agent brings a Python or a Node.
    """
    listening = ListenerSocket()
    relay = _Relay(sandbox, listening)
    running = asyncio.ensure_future(relay.run())
    try:
        await listening.give_to(listener)
        either: set[asyncio.Future[Any]] = {running, relay.port}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not relay.port.done():
            running.result()
        running.add_done_callback(lambda task: _report_end(task, on_lost))
        yield f"http://127.0.0.1:{relay.port.result()}"
    finally:
        listening.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class _Relay:
    """The controller's half of one relay."""

    def __init__(self, sandbox: Sandbox, listening: ListenerSocket) -> None:
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._sandbox = sandbox
        self._listening = listening
        self._errors = b""
        """The end of the program's error output."""

    async def run(self) -> None:
        """Run the program, and again if it is killed. Raises SandboxError."""
        for _ in range(_MAX_RESTARTS + 1):
            try:
                code = await self._run_program()
            except ValueError as error:
                raise self._lost(f"it breaks the protocol: {error}", from_inside=True) from error
            if not self.port.done():
                raise self._not_started(code)
        raise self._lost("its program was killed again and again", from_inside=True)

    async def _run_program(self) -> int:
        """Run the program to its end and return its exit code. Raises ValueError, SandboxError."""
        programs = [
            files("swerl.sandboxes").joinpath(f"_relay_inside.{kind}").read_text()
            for kind in ("py", "js")
        ]
        port = str(self.port.result()) if self.port.done() else "0"
        argv = ["sh", "-c", _BEGIN, "swerl-relay", *programs, port]
        connections = RelayedConnections(self._listening)
        async with self._sandbox.start(argv, cwd="/", user="root") as process:
            work = {
                asyncio.ensure_future(self._receive(process, connections)),
                asyncio.ensure_future(_send(process, connections)),
            }
            try:
                ended, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                return await self._exit_code(process)
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
                await connections.close()

    async def _exit_code(self, process: Process) -> int:
        """Return the exit code of a program whose input or output has ended."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                return await process.wait()
        except TimeoutError as error:
            raise self._lost("the stream to its program broke") from error

    async def _receive(self, process: Process, connections: RelayedConnections) -> None:
        """Handle the program's lines until its output ends."""
        output, partial = process.output(), b""
        while chunk := await self._next(output):
            if chunk.is_stderr:
                self._errors = (self._errors + chunk.data)[-_MAX_DETAIL:]
                continue
            *lines, partial = (partial + chunk.data).split(b"\n")
            if len(partial) > _MAX_LINE_BYTES:
                raise ValueError("a line is endless")
            for line in lines:
                kind, number, data = read_line(line)
                if kind is FrameKind.STARTED and not self.port.done():
                    self.port.set_result(number)
                await connections.handle(kind, number, data)

    async def _next(self, output: AsyncIterator[Chunk]) -> Chunk | None:
        """Return the next piece of output, None at its end."""
        try:
            async with asyncio.timeout(_SILENCE_S if self.port.done() else _START_TIMEOUT_S):
                return await anext(output, None)
        except TimeoutError as error:
            await self._sandbox.run(["true"], timeout_s=_START_TIMEOUT_S)
            # The sandbox runs commands, so something inside stopped the program.
            raise self._lost("its program is silent", from_inside=True) from error

    def _not_started(self, code: int) -> SandboxError:
        if code == _NO_PROGRAM:
            return SandboxError(
                f"sandbox {self._sandbox.id} has neither python3 nor node for the relay",
                hint="add one to the image",
            )
        detail = self._errors.decode(errors="replace").strip()
        return SandboxError(
            f"the relay in sandbox {self._sandbox.id} does not start: code {code} {detail}",
            hint="it needs a loopback interface inside",
        )

    def _lost(self, reason: str, *, from_inside: bool = False) -> SandboxLostError:
        message = f"the relay of sandbox {self._sandbox.id} is gone: {reason}"
        hint = "open a new sandbox; an agent may have ended the relay"
        return SandboxLostError(message, hint=hint, from_inside=from_inside)


async def _send(process: Process, connections: RelayedConnections) -> None:
    try:
        while True:
            await process.send(await connections.outgoing())
    except SandboxLostError:
        raise
    except SandboxError:  # the program has ended, or its stream broke
        return


def _report_end(task: asyncio.Task[None], on_lost: Callable[[SandboxLostError], None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, SandboxLostError):
        on_lost(error)
    elif error:
        message = f"the relay failed: {type(error).__name__}: {error}"
        lost = SandboxLostError(message, hint="open a new sandbox")
        lost.__cause__ = error
        on_lost(lost)


class ListenerSocket:
    """A unix socket that a listener serves and only this object can reach.

    Its name is removed before another process can use it; the open descriptor still leads there.
    """

    def __init__(self) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with tempfile.TemporaryDirectory(prefix="swerl-") as folder:
            path = str(Path(folder) / "s")
            self._listening.bind(path)
            self._listening.listen(_BACKLOG)
            self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC)

    async def give_to(self, listener: Listener) -> None:
        await listener.attach(self._listening)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection. Raises OSError if the listener is gone."""
        return await asyncio.open_unix_connection(f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FrameKind(StrEnum):
    """The event of a line."""

    STARTED = "S"
    """The program listens; its number is the port."""
    PULSE = "P"
    """A sign of life."""
    OPEN = "O"
    """A program in the sandbox connected."""
    DATA = "D"
    """Bytes, in base64."""
    END = "E"
    """No more data from this side; from the controller also the end of the connection."""
    RESET = "R"
    """The connection broke."""


def read_line(line: bytes) -> tuple[FrameKind, int, bytes]:
    """Parse a line into kind, connection and data. Raises ValueError."""
    words = line.decode("ascii").split(" ")
    if len(words) != 3:
        raise ValueError(f"{line[:60]!r} is no line of the relay")
    return FrameKind(words[0]), int(words[1]), base64.b64decode(words[2], validate=True)


class RelayedConnections:
    """All open connections of one run of the program, and the lines that wait for its input."""

    def __init__(self, listening: ListenerSocket) -> None:
        self._listening = listening
        self._open: dict[int, _RelayedConnection] = {}
        self._last = 0
        """The latest connection's number; numbers increase."""
        self._output = bytearray()
        self._has_output, self._has_room = asyncio.Event(), asyncio.Event()

    async def handle(self, kind: FrameKind, number: int, data: bytes) -> None:
        """Handle a line from inside. Raises ValueError if it breaks the protocol.

        It waits while the listener does not read: then the other connections of this sandbox wait,
        too, and no buffer grows.
        """
        if kind is FrameKind.OPEN:
            if len(self._open) >= _MAX_CONNECTIONS:
                raise ValueError("it opens more connections than it may")
            if number <= self._last:  # it would replace a connection of that number
                raise ValueError("it opens a connection twice")
            self._last = number
            opened = self._open[number] = _RelayedConnection(number, self)
            opened.task.add_done_callback(lambda _: self._open.pop(number, None))
        elif connection := self._open.get(number):
            await connection.handle(kind, data)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._listening.connect()

    async def say(self, kind: FrameKind, number: int, data: bytes = b"") -> None:
        """Queue a line for the program; wait while too many wait."""
        while len(self._output) > _MAX_WAITING_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._output += b"%s %d %s\n" % (kind.encode(), number, base64.b64encode(data))
        self._has_output.set()

    async def outgoing(self) -> bytes:
        """Wait for lines to send, and return some."""
        while not self._output:
            self._has_output.clear()
            await self._has_output.wait()
        piece = bytes(self._output[:_BATCH_BYTES])
        del self._output[:_BATCH_BYTES]
        self._has_room.set()
        return piece

    async def close(self) -> None:
        tasks = [connection.task for connection in self._open.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _RelayedConnection:
    """One connection between a program in the sandbox and the listener."""

    def __init__(self, number: int, connections: RelayedConnections) -> None:
        self._number = number
        self._connections = connections
        self._inbound: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING_BYTES // _CHUNK)
        self.task = asyncio.ensure_future(self._run())

    async def handle(self, kind: FrameKind, data: bytes) -> None:
        if kind is FrameKind.RESET:
            self.task.cancel()
        elif kind is FrameKind.DATA and not data:
            raise ValueError("a line has no data")
        elif not self.task.done():
            putting = asyncio.ensure_future(self._inbound.put(data))  # empty for an end
            await asyncio.wait({putting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            putting.cancel()

    async def _run(self) -> None:
        """Carry it until the listener ends it. Then the program inside closes it, too."""
        end, writer = FrameKind.END, None
        inward: asyncio.Future[None] | None = None
        try:
            reader, writer = await self._connections.connect()
            inward = asyncio.ensure_future(self._inward(writer))
            while data := await reader.read(_CHUNK):
                await self._connections.say(FrameKind.DATA, self._number, data)
        except OSError:
            end = FrameKind.RESET
        finally:
            if inward:
                inward.cancel()
            if writer:
                writer.close()
        await self._connections.say(end, self._number)

    async def _inward(self, writer: asyncio.StreamWriter) -> None:
        """Pass the program's data on to the listener."""
        with suppress(OSError):  # the listener may have answered and closed
            while data := await self._inbound.get():
                writer.write(data)
                await writer.drain()
            writer.write_eof()
