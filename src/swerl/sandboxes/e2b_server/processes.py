"""The commands of one sandbox: start them, find them by pid, end them with the sandbox.

A slow client slows its command. The output of a command whose client is gone is dropped.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swerl.core.chat import Json
from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server.failure import Code, WireError, as_failure, gone

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
_FIRST_LINE_BYTES = 256
_QUEUE_LENGTH = 32
"""Chunks that wait for the client before the command has to wait."""
_DEATH_S = 2.0
_SIGNALS = {signal.SIGKILL: "killed", signal.SIGTERM: "terminated"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command that a client starts."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """`root`, or None for the sandbox's ordinary user."""
    takes_input: bool = True
    timeout_s: float | None = None
    """Seconds after which it is killed; None for the sandbox's whole life."""


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


class Processes:
    def __init__(
        self, sandbox: Sandbox, home: str, env: Mapping[str, str], *, on_lost: Callable[[], None]
    ) -> None:
        self._sandbox = sandbox
        self._on_lost = on_lost
        self._home = home
        self._env = env
        self._running: dict[int, RunningCommand] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._gone: WireError | None = None
        """Set when the sandbox ends."""

    def all(self) -> list[RunningCommand]:
        return [running for running in self._running.values() if not running.is_dead]

    def find(self, pid: int) -> RunningCommand:
        """Return the command of this pid. Raises WireError, not found."""
        running = self._running.get(pid)
        if running is None or running.is_dead:
            raise WireError(Code.NOT_FOUND, f"process with pid {pid} not found")
        return running

    async def start(self, spec: CommandSpec) -> RunningCommand:
        """Start a command, which outlives its client. Raises WireError if it cannot start."""
        started: asyncio.Future[RunningCommand] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._live(spec, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await wait_ready(task, started)
        except WireError as error:
            # Its sandbox was removed meanwhile.
            raise self._gone or error from None

    def stop(self) -> None:
        """Report the sandbox's end to all readers."""
        self._gone = gone("")
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
            argv = ["sh", "-c", _LAUNCH, "sh", spec.cwd, *spec.argv]
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
                self._on_lost()
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
                running = await _launched(process, spec)
                self._running[running.pid] = running
                started.set_result(running)
                await running.pump()
        except TimeoutError as error:
            failure = WireError(Code.DEADLINE_EXCEEDED, "the command exceeded its timeout")
            if running is not None:
                running.finish(failure)  # before the kill: old SDKs do not wait longer
            raise failure from error
        finally:
            if running is not None and self._running.get(running.pid) is running:
                del self._running[running.pid]


async def _launched(process: Process, spec: CommandSpec) -> RunningCommand:
    """Return the command once it has printed its pid."""
    if not spec.takes_input:
        await process.end_input()
    chunks, line = process.output(), b""
    errors: list[Chunk] = []
    while b"\n" not in line and len(line) < _FIRST_LINE_BYTES:
        chunk = await anext(chunks, None)
        if chunk is None:
            break
        if chunk.is_stderr:
            errors.append(chunk)
        else:
            line += chunk.data
    word, _, rest = line.partition(b"\n")
    if word.isdigit():
        return RunningCommand(int(word), spec, process, [*errors, Chunk(rest)], chunks)
    reason = {
        b"cwd": f"cwd {spec.cwd!r} does not exist",
        b"command": f"the image has no {spec.argv[0]!r}",
    }.get(word)
    if reason is None:
        output = b"".join(chunk.data for chunk in errors).decode(errors="replace").strip()
        reason = f"the command cannot start: {output[:300]}"
    raise WireError(Code.INVALID_ARGUMENT, reason)


class RunningCommand:
    """A command, and the output that waits for its client."""

    def __init__(
        self,
        pid: int,
        spec: CommandSpec,
        process: Process,
        first: Sequence[Chunk],
        chunks: AsyncIterator[Chunk],
    ) -> None:
        self.pid = pid
        self.spec = spec
        self.is_dead = False
        """True once it was killed; its last output may still arrive."""
        self._process = process
        self._chunks = chunks
        self._waiting = deque(chunk for chunk in first if chunk.data)
        self._last: CommandEnd | WireError | None = None
        self._signals: set[int] = set()
        self._is_followed = True
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()

    async def receive(self) -> Chunk | CommandEnd:
        """Wait for the next Chunk, and at last for the CommandEnd.

        Raises WireError if the command fails. It is safe to cancel, and to call again.
        """
        while not self._waiting:
            if isinstance(self._last, WireError):
                raise self._last
            if self._last is not None:
                return self._last
            self._arrived.clear()
            await self._arrived.wait()
        self._taken.set()
        return self._waiting.popleft()

    def leave(self) -> None:
        """Drop its output from here on, because its client is gone."""
        self._is_followed = False
        self._waiting.clear()
        self._taken.set()

    async def pump(self) -> None:
        """Pass its output on until it has ended."""
        async for chunk in self._chunks:
            while self._is_followed and len(self._waiting) >= _QUEUE_LENGTH:
                self._taken.clear()
                await self._taken.wait()
            if self._is_followed:
                self._waiting.append(chunk)
                self._arrived.set()
        code = await self._process.wait()
        self.finish(CommandEnd(code, code - 128 if code - 128 in self._signals else 0))

    def finish(self, last: CommandEnd | WireError) -> None:
        """Report the end to the client; only the first report counts."""
        if self._last is None:
            self._last = last
            self._arrived.set()

    async def signal(self, number: int) -> None:
        """Send a signal to it and to all that it started; SIGKILL waits until it is dead."""
        self._signals.add(number)
        await self._process.signal(number)
        if number == signal.SIGKILL:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_S):
                    await self._process.wait()
                    self.is_dead = True

    async def send(self, data: bytes) -> None:
        if not self.spec.takes_input:
            raise WireError(Code.INTERNAL, "stdin not enabled or closed")
        await self._process.send(data)

    async def end_input(self) -> None:
        await self._process.end_input()

    def message(self) -> dict[str, Json]:
        """Return it in the SDK's form, as lists show it."""
        cmd, *args = self.spec.argv
        config: dict[str, Json] = {
            "cmd": cmd, "args": list(args), "cwd": self.spec.cwd, "envs": dict(self.spec.env)
        }  # fmt: skip
        return {"pid": self.pid, "config": config}


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
