"""The commands of one sandbox: started, found by pid or tag, ended with it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server.failure import Code, Failure, as_failure, gone, why
from swerl.sandboxes.e2b_server.running import Running
from swerl.sandboxes.e2b_server.spec import Size, Spec
from swerl.sandboxes.e2b_server.waiting import wait_ready

_LAUNCH = """\
cd -- "$1" 2>/dev/null || { echo cwd; exit; }
shift
[ "$1" != /bin/bash ] || [ -x /bin/bash ] || { shift; set -- /bin/sh "$@"; }
command -v "$1" >/dev/null 2>&1 || { echo command; exit; }
echo $$
exec "$@"
"""
"""Its first line is the pid that the command has inside, or why there is no command.

An image without bash runs the SDK's `/bin/bash -l -c` with the shell that it has."""
_ON_TERMINAL = 'tty; stty cols "$1" rows "$2"; shift 2; exec "$@"'
"""Its first line is the path of the terminal that the command has."""
_FIRST_LINE_BYTES = 256


class Processes:
    """The commands of one sandbox."""

    def __init__(
        self, sandbox: Sandbox, home: str, env: Mapping[str, str], on_lost: Callable[[bool], None]
    ) -> None:
        self._sandbox = sandbox
        self._on_lost = on_lost
        self._can_run = False
        """Whether a command has run: what cannot start after that, others in there prevent."""
        self._home = home
        self._env = env
        self._running: dict[int, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    def all(self) -> list[Running]:
        """Return those that run."""
        return [running for running in self._running.values() if not running.is_dead]

    def find(self, *, pid: int = 0, tag: str = "") -> Running:
        """Return the one of this pid or tag. Raises Failure, not found."""
        for running in reversed(self.all()):
            if running.pid == pid or (tag and running.spec.tag == tag):
                return running
        name = f"tag {tag!r}" if tag else f"pid {pid}"
        raise Failure(Code.NOT_FOUND, f"process with {name} not found")

    async def start(self, spec: Spec) -> Running:
        """Start a command; it outlives its client. Raises Failure where it cannot start."""
        started: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._live(spec, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await wait_ready(task, started)

    async def resize(self, running: Running, size: Size) -> None:
        """Give a command's terminal another size."""
        if not running.terminal:
            raise Failure(Code.INTERNAL, f"process {running.pid} has no terminal")
        argv = ["stty", "-F", running.terminal, "cols", str(size.columns), "rows", str(size.rows)]
        done = await self._sandbox.run(argv, cwd="/", user=running.spec.user, timeout_s=10)
        if done.exit_code:
            raise Failure(Code.INTERNAL, f"cannot resize the terminal: {done.text[:200]}")

    def stop(self, *, from_inside: bool) -> None:
        """Tell all who listen that the sandbox goes, and whether what runs inside is the cause."""
        for running in self._running.values():
            running.finish(gone("", from_inside=from_inside))

    async def close(self) -> None:
        """Let go of the commands, after the sandbox that held them is gone."""
        self._over.set()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, spec: Spec, started: asyncio.Future[Running]) -> None:
        """Hold a command until it has ended, and what it left behind until the sandbox goes.

        E2B's own commands leave their daemons running, and leaving the context would kill them.
        """
        home = {"HOME": self._home} if spec.user is None else {}
        env = {**home, **self._env, **spec.env}
        try:
            argv = _argv(spec)
            async with self._sandbox.start(argv, cwd="/", env=env, user=spec.user) as process:
                await self._run(process, spec, started)
                await process.end_input()
                await self._over.wait()
        except Failure:
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

    async def _run(self, process: Process, spec: Spec, started: asyncio.Future[Running]) -> None:
        """Follow a command to its end. Raises Failure, deadline exceeded."""
        running: Running | None = None
        try:
            async with asyncio.timeout(spec.timeout_s):
                running = await _launched(process, spec, self._can_run)
                self._can_run = True
                self._running[running.pid] = running
                started.set_result(running)
                running.finish(await running.pump())
        except TimeoutError as error:
            failure = Failure(Code.DEADLINE_EXCEEDED, "the command ran into its timeout")
            if running is not None:
                running.finish(failure)  # before it is killed: old SDKs wait no longer
            raise failure from error
        finally:
            if running is not None and self._running.get(running.pid) is running:
                del self._running[running.pid]


def _argv(spec: Spec) -> Sequence[str]:
    command = list(spec.argv)
    if spec.size:
        size = [str(spec.size.columns), str(spec.size.rows)]
        inner = shlex.join(["sh", "-c", _ON_TERMINAL, "sh", *size, *command])
        command = ["script", "-qefc", inner, "/dev/null"]
    return ["sh", "-c", _LAUNCH, "sh", spec.cwd, *command]


async def _launched(process: Process, spec: Spec, can_run: bool) -> Running:
    """Return the command once it has told its pid, and its terminal if it has one."""
    if not spec.takes_input:
        await process.end_input()
    chunks = process.output()
    kept: list[Chunk] = []
    word, rest = await _first_line(chunks, kept)
    if not word.isdigit():
        raise _not_started(word.decode(errors="replace"), spec, kept, can_run)
    running = Running(int(word), spec, process, chunks)
    if spec.size:
        line, rest = await _first_line(chunks, kept, rest)
        running.terminal = line.strip().decode(errors="replace")
    for chunk in (*kept, Chunk(rest)):
        await running.hand_out(chunk)
    return running


async def _first_line(
    chunks: AsyncIterator[Chunk], kept: list[Chunk], data: bytes = b""
) -> tuple[bytes, bytes]:
    """Return the first line of standard output and what follows it; keep standard error."""
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


def _not_started(word: str, spec: Spec, kept: Sequence[Chunk], can_run: bool) -> Failure:
    if word == "cwd":
        return Failure(Code.INVALID_ARGUMENT, f"cwd {spec.cwd!r} does not exist")
    if word == "command":
        command = "script, which makes terminals," if spec.size else repr(spec.argv[0])
        return Failure(Code.INVALID_ARGUMENT, f"the image has no {command}")
    said = b"".join(chunk.data for chunk in kept).decode(errors="replace").strip()
    message = f"the command cannot start: {said[:300]}{why(can_run)}"
    return Failure(Code.INVALID_ARGUMENT, message)
