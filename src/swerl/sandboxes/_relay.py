"""Make a listener reachable from a sandbox without a network, over the backend's exec stream.

A small server inside (`_relay_inside.py`) listens on the sandbox's loopback. A bridge process,
started with `Sandbox.start`, carries its connections over stdin and stdout to the controller, which
connects each to one listener and to nothing else. If the stream breaks, the next bridge continues
where it stopped. If the server is killed, it is restarted a few times; then the sandbox is lost.

Both halves exchange numbered lines, so a broken link loses none. `F <number> <kind> <connection>
<payload>` is a frame with a text payload. `A <number>` acknowledges all frames up to this number.
`H <number>` does the same at the start of a link and requests the later frames again. `P` requests
an `A`. Lines are ASCII, because some providers carry streams as text. On each connection a side
sends at most WINDOW bytes more than the other has passed on, so a slow reader delays no other
connection and the buffer for it is bounded.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from swerl.core.contracts import Listener, Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError

_NO_PROGRAM = 96
_NO_SERVER = 3
_BEGIN = f"""
python=$1; perl=$2; shift 2; cd /
if command -v python3 >/dev/null 2>&1; then exec python3 -I -S -c "$python" "$@"; fi
if command -v perl >/dev/null 2>&1; then exec perl -e "$perl" -- "$@"; fi
exit {_NO_PROGRAM}
"""
_SERVE_TIMEOUT_S = 30.0
_PING_S = 15.0
_SILENCE_S = 45.0
"""A link without any output for this time, despite pings, is closed and opened again."""
_GIVE_UP_S = 90.0
"""Seconds without a working link after which the sandbox is lost."""
_PAUSES_S = (0.05, 0.2, 1.0, 3.0)
"""Pauses between attempts at a link; the last repeats."""
_MAX_RESTARTS = 5
_MAX_DETAIL = 300
"""Largest length of an error text from inside."""

WINDOW = 1 << 19
"""Bytes in flight in one direction of a connection; the half inside has the same number."""
MAX_CONNECTIONS = 128
"""Connections at once; the half inside accepts no more."""
_CHUNK = 24 * 1024
_BACKLOG = 256
_BATCH_BYTES = 1 << 17
_MAX_LINE_BYTES = 1 << 16
_MAX_KEPT_BYTES = 1 << 27
"""Largest number of unacknowledged bytes: more than all connections can have in flight."""


@asynccontextmanager
async def open_relay(
    sandbox: Sandbox, listener: Listener, *, on_lost: Callable[[SandboxLostError], None]
) -> AsyncIterator[str]:
    """Make `listener` reachable from inside the sandbox and yield its base URL there.

    `on_lost` is called once if the relay fails permanently. Raises SandboxError if the image has
    neither Python nor Perl.
    """
    relay = _Relay(sandbox, ListenerSocket())
    running = None
    try:
        await relay.serve()
        await relay.socket.give_to(listener)
        running = asyncio.ensure_future(relay.keep_linked())
        running.add_done_callback(lambda task: _report_end(task, on_lost))
        yield f"http://127.0.0.1:{relay.port}"
    finally:
        relay.socket.close()
        if running:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await relay.connections.close()


class _Relay:
    """The controller's half of one relay."""

    def __init__(self, sandbox: Sandbox, listening: ListenerSocket) -> None:
        self.socket = listening
        self.port = 0
        self._sandbox = sandbox
        self._name = f"swerl-relay-{secrets.token_hex(16)}"
        self._wire = Wire()
        self.connections = RelayedConnections(listening, self._wire.push)
        self._received_at = 0.0
        self._error_output = b""
        self._protocol_errors = 0

    async def serve(self) -> None:
        """Start the server inside; a restarted one gets the same port."""
        done = await self._sandbox.run(
            _argv("serve", self._name, str(self.port)),
            cwd="/",
            user="root",
            timeout_s=_SERVE_TIMEOUT_S,
        )
        if done.exit_code == _NO_PROGRAM:
            raise SandboxError(
                f"sandbox {self._sandbox.id} has neither python3 nor perl for the relay",
                hint='add one to the image, or set way = "public"',
            )
        try:
            self.port = int(done.stdout)
        except ValueError as error:
            raise SandboxError(
                f"the relay in sandbox {self._sandbox.id} does not start: "
                f"{done.text[-_MAX_DETAIL:]}",
                hint="it needs a loopback interface inside",
            ) from error

    async def keep_linked(self) -> None:
        """Keep a link to the server. Raises SandboxLostError if there can be none."""
        loop, failures, restarts = asyncio.get_running_loop(), 0, 0
        self._received_at = loop.time()
        while True:
            before = self._received_at
            code = await self._run_link()
            failures = 0 if self._received_at > before else failures + 1
            if code == _NO_SERVER:
                restarts += 1
                if restarts > _MAX_RESTARTS:
                    raise self._lost("its server was killed again and again", from_inside=True)
                await self._restart()
            if loop.time() - self._received_at > _GIVE_UP_S:
                detail = self._error_output.decode(errors="replace")
                raise self._lost("no exec stream lasts: ", detail)
            if failures:
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    async def _restart(self) -> None:
        await self.connections.close()
        self._wire.reset()
        try:
            await self.serve()
        except SandboxLostError:
            raise
        except SandboxError as error:
            raise self._lost("its server does not restart: ", str(error)) from error

    async def _run_link(self) -> int | None:
        """Run one bridge process until its stream ends; return its exit code if it has one."""
        try:
            argv = _argv("carry", self._name)
            async with self._sandbox.start(argv, cwd="/", user="root") as process:
                self._wire.begin_link()
                await self._exchange(process)
                return await process.wait()
        except SandboxLostError:
            raise
        except ValueError as error:
            self._protocol_errors += 1
            if self._protocol_errors > _MAX_RESTARTS:
                raise self._lost("it breaks the protocol: ", str(error)) from error
            return None
        except (SandboxError, TimeoutError) as error:
            self._error_output = str(error).encode()[-_MAX_DETAIL:]
            return None

    async def _exchange(self, process: Process) -> None:
        """Send and receive lines until the bridge ends or either direction breaks."""
        tasks = {
            asyncio.ensure_future(self._receive(process)),
            asyncio.ensure_future(self._send(process)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_SILENCE_S) as timer:
            async for chunk in process.output():
                if chunk.is_stderr:
                    self._error_output = (self._error_output + chunk.data)[-_MAX_DETAIL:]
                    continue
                self._received_at = loop.time()
                timer.reschedule(self._received_at + _SILENCE_S)
                for frame in self._wire.take(chunk.data):
                    self.connections.handle(frame)

    async def _send(self, process: Process) -> None:
        while True:
            try:
                async with asyncio.timeout(_PING_S):
                    lines = await self._wire.outgoing()
            except TimeoutError:
                self._wire.ping()
            else:
                await process.send(lines)

    def _lost(self, why: str, detail: str = "", *, from_inside: bool = False) -> SandboxLostError:
        message = f"the relay of sandbox {self._sandbox.id} is gone: {why}{detail}"
        hint = "open a new sandbox; an agent may have ended the relay"
        return SandboxLostError(message, hint=hint, from_inside=from_inside)


def _argv(*arguments: str) -> list[str]:
    folder = files("swerl.sandboxes")
    programs = [folder.joinpath(f"_relay_inside.{kind}").read_text() for kind in ("py", "pl")]
    return ["sh", "-c", _BEGIN, "swerl-relay", *programs, *arguments]


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
    """The event of a frame."""

    OPEN = "O"
    """A program in the sandbox connected."""
    DATA = "D"
    """Bytes, in base64."""
    END = "E"
    """No more data from this side."""
    RESET = "R"
    """The connection broke."""
    WINDOW = "W"
    """This number of bytes was passed on, and as many more may be sent."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One event of one connection."""

    kind: FrameKind
    connection: int
    payload: str = ""


class RelayedConnections:
    """All open connections of one relay."""

    def __init__(self, listening: ListenerSocket, push: Callable[[Frame], None]) -> None:
        self._socket = listening
        self._push = push
        self._open: dict[int, _RelayedConnection] = {}
        self._last = 0
        """The latest connection's number; numbers increase."""

    def handle(self, frame: Frame) -> None:
        """Handle a frame from inside. Raises ValueError if it breaks the protocol."""
        if frame.kind is FrameKind.OPEN:
            if len(self._open) > 2 * MAX_CONNECTIONS:  # some may be about to end
                raise ValueError("the relay opens more connections than it may")
            if frame.connection <= self._last:  # it would replace a connection of that number
                raise ValueError("the relay opens a connection twice")
            self._last = frame.connection
            opened = _RelayedConnection(frame.connection, self._push)
            self._open[frame.connection] = opened
            opened.task = asyncio.ensure_future(opened.run(self._socket))
            opened.task.add_done_callback(lambda _: self._open.pop(frame.connection, None))
        elif connection := self._open.get(frame.connection):
            connection.handle(frame)

    async def close(self) -> None:
        """End every connection; later ones are numbered from 1 again."""
        self._last = 0
        tasks = [each.task for each in self._open.values() if each.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _RelayedConnection:
    """One connection between a program in the sandbox and the listener."""

    def __init__(self, number: int, push: Callable[[Frame], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._number = number
        self._push = push
        self._credit = WINDOW
        self._more_credit = asyncio.Event()
        self._inbound: asyncio.Queue[bytes] = asyncio.Queue()
        self._inbound_size = 0
        self._inbound_ended = False

    def handle(self, frame: Frame) -> None:
        if frame.kind in (FrameKind.DATA, FrameKind.END):
            if self._inbound_ended:
                raise ValueError("the relay continues after an end")
            self._inbound_ended = frame.kind is FrameKind.END or not frame.payload
        match frame.kind:
            case FrameKind.DATA:
                data = base64.b64decode(frame.payload, validate=True)
                self._inbound_size += len(data)
                if self._inbound_size > WINDOW:
                    raise ValueError("the relay sends more than it may")
                self._inbound.put_nowait(data)
            case FrameKind.END:
                self._inbound.put_nowait(b"")
            case FrameKind.WINDOW:
                self._credit += int(frame.payload)
                if self._credit > WINDOW:
                    raise ValueError("the relay passed on more than it received")
                self._more_credit.set()
            case _:
                if self.task:
                    self.task.cancel()

    async def run(self, listening: ListenerSocket) -> None:
        writer = None
        try:
            reader, writer = await listening.connect()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._inward(writer))
                group.create_task(self._outward(reader))
        except* OSError:
            self._send(FrameKind.RESET)
        finally:
            if writer:
                writer.close()

    async def _inward(self, writer: asyncio.StreamWriter) -> None:
        """Pass the program's data on to the listener."""
        while data := await self._inbound.get():
            writer.write(data)
            await writer.drain()
            self._inbound_size -= len(data)
            self._send(FrameKind.WINDOW, str(len(data)))
        with suppress(OSError):  # the listener may have answered and closed
            writer.write_eof()

    async def _outward(self, reader: asyncio.StreamReader) -> None:
        """Pass the listener's data on to the program."""
        while True:
            while self._credit <= 0:
                self._more_credit.clear()
                await self._more_credit.wait()
            data = await reader.read(min(_CHUNK, self._credit))
            if not data:
                self._send(FrameKind.END)
                return
            self._credit -= len(data)
            self._send(FrameKind.DATA, base64.b64encode(data).decode())

    def _send(self, kind: FrameKind, payload: str = "") -> None:
        self._push(Frame(kind, self._number, payload))


class Wire:
    """The controller's end of the numbered lines."""

    def __init__(self) -> None:
        self._has_output = asyncio.Event()
        self.reset()

    def reset(self) -> None:
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._sent = 0
        self._received = 0
        self.begin_link()

    def begin_link(self) -> None:
        """Drop the partial lines of a broken link."""
        self._partial = b""
        self._greeted = False
        self._out = bytearray(b"H %d\n" % self._received)
        self._has_output.set()

    def push(self, frame: Frame) -> None:
        """Send a frame, and again on later links until it is acknowledged."""
        self._sent += 1
        text = f"F {self._sent} {frame.kind} {frame.connection} {frame.payload}\n".encode()
        self._unacknowledged.append((self._sent, text))
        self._kept_bytes += len(text)
        if self._greeted:
            self._put(text)

    async def outgoing(self) -> bytes:
        """Wait for lines to send, and return some."""
        await self._has_output.wait()
        piece = bytes(self._out[:_BATCH_BYTES])
        del self._out[:_BATCH_BYTES]
        if not self._out:
            self._has_output.clear()
        return piece

    def ping(self) -> None:
        self._put(b"P\n")

    def take(self, data: bytes) -> Iterator[Frame]:
        """Parse received bytes and yield the new frames.

        Raises ValueError if they break the protocol.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_LINE_BYTES:
            raise ValueError("a line of the relay is endless")
        if self._kept_bytes > _MAX_KEPT_BYTES:
            raise ValueError("the relay acknowledges nothing")
        before = self._received
        for line in lines:
            frame = self._read(line.decode("ascii").split(" "))
            if frame:
                yield frame
        if self._received > before:
            self._put(b"A %d\n" % self._received)

    def _read(self, words: list[str]) -> Frame | None:
        match words:
            case ["A" | "H" as word, number]:
                self._acknowledge(int(number))
                if word == "H" and not self._greeted:
                    self._greeted = True
                    self._put(b"".join(text for _, text in self._unacknowledged))
            case ["F", number, kind, connection, payload]:
                if int(number) > self._received + 1:
                    raise ValueError(f"frame {self._received + 1} of the relay is missing")
                if int(number) == self._received + 1:
                    self._received += 1
                    return Frame(FrameKind(kind), int(connection), payload)
            case _:
                raise ValueError(f"the relay sent {' '.join(words)!r:.60}")
        return None

    def _acknowledge(self, upto: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= upto:
            self._kept_bytes -= len(self._unacknowledged.popleft()[1])

    def _put(self, text: bytes) -> None:
        self._out += text
        self._has_output.set()
