"""The commands of one sandbox: start them, find them by pid or tag, end them with the sandbox.

Output that no client reads is kept up to a limit, the newest part, for the next client that
connects. A slow client slows its command; a client that leaves returns its unread output.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swerl.core.chat import Json
from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server.failure import Code, WireError, as_failure, gone, why

_LAUNCH = """\
cd -- "$1" 2>/dev/null || { echo cwd; exit; }
shift
[ "$1" != /bin/bash ] || [ -x /bin/bash ] || { shift; set -- /bin/sh "$@"; }
command -v "$1" >/dev/null 2>&1 || { echo command; exit; }
echo $$
exec "$@"
"""
"""Its first line is the command's pid inside, or the reason that there is no command.

An image without bash runs the SDK's `/bin/bash -l -c` with its own shell.
"""
_ON_TERMINAL = 'tty; stty cols "$1" rows "$2"; shift 2; exec "$@"'
"""Its first line is the path of the command's terminal."""
_FIRST_LINE_BYTES = 256
BACKLOG_BYTES = 4 << 20
"""Most output kept for the next reader."""
_QUEUE_LENGTH = 32
"""Chunks that wait for one reader before the command has to wait."""
_DEATH_S = 2.0
_SIGNALS = {signal.SIGKILL: "killed", signal.SIGTERM: "terminated"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """Size in characters."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command that a client starts."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """`root`, or None for the sandbox's ordinary user."""
    tag: str = ""
    takes_input: bool = True
    size: TerminalSize | None = None
    """Size of its terminal, if it has one."""
    timeout_s: float | None = None
    """Seconds after which it is killed; None for the sandbox's whole life."""

    def message(self) -> dict[str, Json]:
        cmd, *args = self.argv
        return {"cmd": cmd, "args": list(args), "cwd": self.cwd, "envs": dict(self.env)}


@dataclass(frozen=True, slots=True)
class CommandEnd:
    code: int
    by_signal: int = 0
    """The client's signal that ended it; 0 if it ended by itself."""

    def message(self) -> dict[str, Json]:
        """Return it in the SDK's form; after a signal the exit code is -1."""
        if self.by_signal:
            status = f"signal: {_SIGNALS.get(signal.Signals(self.by_signal), self.by_signal)}"
            return {"exitCode": -1, "exited": False, "status": status, "error": status}
        status = f"exit status {self.code}"
        body: dict[str, Json] = {"exitCode": self.code, "exited": True, "status": status}
        return {**body, "error": status} if self.code else body


Event = Chunk | CommandEnd | WireError


class Processes:
    def __init__(
        self, sandbox: Sandbox, home: str, env: Mapping[str, str], on_lost: Callable[[bool], None]
    ) -> None:
        self._sandbox = sandbox
        self._on_lost = on_lost
        self._can_run = False
        """True once a command has run: a later start fails only because of other programs
        inside."""
        self._home = home
        self._env = env
        self._running: dict[int, RunningCommand] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._gone: WireError | None = None
        """Set when the sandbox ends."""

    def all(self) -> list[RunningCommand]:
        return [running for running in self._running.values() if not running.is_dead]

    def find(self, *, pid: int = 0, tag: str = "") -> RunningCommand:
        """Return the command of this pid or tag. Raises WireError, not found."""
        for running in reversed(self.all()):
            if running.pid == pid or (tag and running.spec.tag == tag):
                return running
        name = f"tag {tag!r}" if tag else f"pid {pid}"
        raise WireError(Code.NOT_FOUND, f"process with {name} not found")

    async def start(self, spec: CommandSpec) -> RunningCommand:
        """Start a command, which outlives its client. Raises WireError if it cannot start."""
        started: asyncio.Future[RunningCommand] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._live(spec, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await wait_ready(task, started)
        except WireError as error:
            # Its sandbox was removed meanwhile, which nothing inside brought about.
            raise self._gone or error from None

    async def resize(self, running: RunningCommand, size: TerminalSize) -> None:
        if not running.terminal:
            raise WireError(Code.INTERNAL, f"process {running.pid} has no terminal")
        argv = ["stty", "-F", running.terminal, "cols", str(size.columns), "rows", str(size.rows)]
        done = await self._sandbox.run(argv, cwd="/", user=running.spec.user, timeout_s=10)
        if done.exit_code:
            raise WireError(Code.INTERNAL, f"cannot resize the terminal: {done.text[:200]}")

    def stop(self, *, from_inside: bool) -> None:
        """Report to all readers that the sandbox ends, and whether a program inside is the
        cause."""
        self._gone = gone("", from_inside=from_inside)
        for running in self._running.values():
            running.finish(self._gone)

    async def close(self) -> None:
        """Cancel the tasks of the commands, after their sandbox is gone."""
        self._over.set()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, spec: CommandSpec, started: asyncio.Future[RunningCommand]) -> None:
        """Hold a command until it has ended, and the daemons that it left until the sandbox ends.

        E2B's own commands leave their daemons running; leaving the context would kill them.
        """
        home = {"HOME": self._home} if spec.user is None else {}
        env = {**home, **self._env, **spec.env}
        try:
            argv = _argv(spec)
            async with self._sandbox.start(argv, cwd="/", env=env, user=spec.user) as process:
                await self._run(process, spec, started)
                await process.end_input()
                await self._over.wait()
        except WireError:
            if not started.done():
                raise
        except SandboxError as error:
            if not started.done():
                raise
            started.result().finish(as_failure(error))
            if isinstance(error, SandboxLostError):
                self._on_lost(error.from_inside)
        finally:
            if started.done():
                started.result().finish(gone(""))

    async def _run(
        self, process: Process, spec: CommandSpec, started: asyncio.Future[RunningCommand]
    ) -> None:
        """Follow a command to its end. Raises WireError, deadline exceeded."""
        running: RunningCommand | None = None
        try:
            async with asyncio.timeout(spec.timeout_s):
                running = await _launched(process, spec, self._can_run)
                self._can_run = True
                self._running[running.pid] = running
                started.set_result(running)
                running.finish(await running.pump())
        except TimeoutError as error:
            failure = WireError(Code.DEADLINE_EXCEEDED, "the command exceeded its timeout")
            if running is not None:
                running.finish(failure)  # before the kill: old SDKs do not wait longer
            raise failure from error
        finally:
            if running is not None and self._running.get(running.pid) is running:
                del self._running[running.pid]


def _argv(spec: CommandSpec) -> Sequence[str]:
    command = list(spec.argv)
    if spec.size:
        size = [str(spec.size.columns), str(spec.size.rows)]
        inner = shlex.join(["sh", "-c", _ON_TERMINAL, "sh", *size, *command])
        command = ["script", "-qefc", inner, "/dev/null"]
    return ["sh", "-c", _LAUNCH, "sh", spec.cwd, *command]


async def _launched(process: Process, spec: CommandSpec, can_run: bool) -> RunningCommand:
    """Return the command once it has printed its pid, and its terminal if it has one."""
    if not spec.takes_input:
        await process.end_input()
    chunks = process.output()
    kept: list[Chunk] = []
    word, rest = await _first_line(chunks, kept)
    if not word.isdigit():
        raise _not_started(word.decode(errors="replace"), spec, kept, can_run)
    running = RunningCommand(int(word), spec, process, chunks)
    if spec.size:
        line, rest = await _first_line(chunks, kept, rest)
        running.terminal = line.strip().decode(errors="replace")
    for chunk in (*kept, Chunk(rest)):
        await running.hand_out(chunk)
    return running


async def _first_line(
    chunks: AsyncIterator[Chunk], kept: list[Chunk], data: bytes = b""
) -> tuple[bytes, bytes]:
    """Return the first line of standard output and the rest; append standard error to `kept`."""
    while b"\n" not in data and len(data) < _FIRST_LINE_BYTES:
        chunk = await anext(chunks, None)
        if chunk is None:
            break
        if chunk.is_stderr:
            kept.append(chunk)
        else:
            data += chunk.data
    line, _, rest = data.partition(b"\n")
    return line, rest


def _not_started(word: str, spec: CommandSpec, kept: Sequence[Chunk], can_run: bool) -> WireError:
    if word == "cwd":
        return WireError(Code.INVALID_ARGUMENT, f"cwd {spec.cwd!r} does not exist")
    if word == "command":
        command = "`script`, which makes terminals" if spec.size else repr(spec.argv[0])
        return WireError(Code.INVALID_ARGUMENT, f"the image has no {command}")
    output = b"".join(chunk.data for chunk in kept).decode(errors="replace").strip()
    message = f"the command cannot start: {output[:300]}{why(can_run)}"
    return WireError(Code.INVALID_ARGUMENT, message)


class RunningCommand:
    def __init__(
        self, pid: int, spec: CommandSpec, process: Process, chunks: AsyncIterator[Chunk]
    ) -> None:
        self.pid = pid
        self.spec = spec
        self.terminal = ""
        """Path of its terminal inside; empty if it has none."""
        self.is_dead = False
        """True once it was killed; its last output may still arrive."""
        self._process = process
        self._chunks = chunks
        self._readers: list[OutputReader] = []
        self._backlog: deque[Chunk] = deque()
        self._backlog_bytes = 0
        self._last: CommandEnd | WireError | None = None
        self._signalled: set[int] = set()
        self._had_reader = False

    @contextmanager
    def listen(self) -> Iterator[OutputReader]:
        """Yield a reader of the kept output and of all that follows."""
        self._had_reader = True
        reader = OutputReader()
        reader.waiting.extend(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0
        self._readers.append(reader)
        if self._last is not None:
            reader.finish(self._last)
        try:
            yield reader
        finally:
            self._readers.remove(reader)
            reader.leave()
            if not self._readers and self._last is None:
                for chunk in reader.waiting:
                    self._keep(chunk)

    async def pump(self) -> CommandEnd:
        """Pass its output to the readers until it has ended; return its end."""
        async for chunk in self._chunks:
            await self.hand_out(chunk)
        code = await self._process.wait()
        return CommandEnd(code, code - 128 if code - 128 in self._signalled else 0)

    async def hand_out(self, chunk: Chunk) -> None:
        """Pass a chunk to all readers, or keep it if there is none."""
        if not chunk.data:
            return
        if not self._readers:
            self._keep(chunk)
        for reader in tuple(self._readers):
            await reader.put(chunk)

    def finish(self, last: CommandEnd | WireError) -> None:
        """Report the end to all readers, present and future; only the first report counts.

        A command that has ended cannot be found, so its output is kept only for a starter that has
        not read yet.
        """
        if self._last is None:
            self._last = last
            if self._had_reader:
                self._backlog.clear()
            for reader in self._readers:
                reader.finish(last)

    async def signal(self, number: int) -> None:
        """Send a signal to it and to all that it started; SIGKILL waits until it is dead."""
        self._signalled.add(number)
        await self._process.signal(number)
        if number == signal.SIGKILL:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_S):
                    await self._process.wait()
                    self.is_dead = True

    async def send(self, data: bytes, *, to_terminal: bool) -> None:
        if to_terminal != bool(self.terminal):
            kind = "has no terminal" if to_terminal else "has a terminal, which takes its input"
            raise WireError(Code.INTERNAL, f"process {self.pid} {kind}")
        if not self.spec.takes_input:
            raise WireError(Code.INTERNAL, "stdin not enabled or closed")
        await self._process.send(data)

    async def end_input(self) -> None:
        if self.terminal:
            message = "cannot close the input of a terminal; send Ctrl+D (0x04) instead"
            raise WireError(Code.INTERNAL, message)
        await self._process.end_input()

    def _keep(self, chunk: Chunk) -> None:
        self._backlog.append(chunk)
        self._backlog_bytes += len(chunk.data)
        while self._backlog_bytes > BACKLOG_BYTES:
            self._backlog_bytes -= len(self._backlog.popleft().data)


class OutputReader:
    """One client's view of a command: its chunks in order, then a CommandEnd or a WireError."""

    def __init__(self) -> None:
        self.waiting: deque[Chunk] = deque()
        self._last: CommandEnd | WireError | None = None
        self._has_left = False
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()

    async def next(self) -> Event:
        """Return the next event; safe to cancel and to call again."""
        while not self.waiting:
            if self._last is not None:
                return self._last
            self._arrived.clear()
            await self._arrived.wait()
        self._taken.set()
        return self.waiting.popleft()

    async def put(self, chunk: Chunk) -> None:
        """Append a chunk; wait while the queue is full."""
        while len(self.waiting) >= _QUEUE_LENGTH and not self._has_left:
            self._taken.clear()
            await self._taken.wait()
        self.waiting.append(chunk)
        self._arrived.set()

    def finish(self, last: CommandEnd | WireError) -> None:
        self._last = last
        self._arrived.set()

    def leave(self) -> None:
        """Stop reading: `put` no longer waits."""
        self._has_left = True
        self._taken.set()


async def wait_ready(holder: asyncio.Task[None], ready: asyncio.Future[T]) -> T:
    """Return the value that a task sets and then holds; raise the task's error if it ends before.

    A cancellation of the caller cancels the task.
    """
    both: list[asyncio.Future[Any]] = [holder, ready]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        holder.cancel()
        raise
    if not ready.done():
        holder.result()
    return ready.result()


async def with_silences(
    items: AsyncIterator[T], silence_s: float
) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None whenever no item has come for `silence_s`."""
    while True:
        coming = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait([coming], timeout=silence_s))[0]:
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])
        try:
            yield coming.result()
        except StopAsyncIteration:
            return
