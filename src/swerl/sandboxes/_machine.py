"""Commands, files and the end of a sandbox in a container or pod.

A provider starts a program and carries its streams, and no more. So every command runs within a
shell of ours (`_machine_scripts.COMMAND`), which marks its processes and prints when it starts and
ends. A *signaller*, a shell that holds the controller's connection, sends signals to the processes
with a mark. The machine's first process restarts it, and ends with the controller.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import (
    ROOT_ENV,
    TIMED_OUT,
    CappedOutput,
    Chunk,
    Exec,
    Limits,
    closed_input,
    file_error,
    require_path,
)
from swerl.sandboxes import _machine_scripts as scripts
from swerl.sandboxes._relay import open_relay

NAME = "swerl.name"
"""Label, or annotation, that holds a sandbox's name."""
_BOOT_TIMEOUT_S = 60.0
_BEGIN_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_FILE_TIMEOUT_S = 600.0
LOSS_TIMEOUT_S = 2.0
"""Time after a broken stream in which the provider may report the machine's end."""
_CUT_TIMEOUT_S = 0.5
"""The same for the stream of a command, whose end is asked for next."""
_END_TIMEOUT_S = 10.0
"""Time after the end of its stream in which the provider may report a command's end."""
_REPORT_S = 6.0
"""Time in which the provider reports the end that a command's shell printed. Docker 20.10 takes 4 s
if the command before left a process that holds its output."""
_LINGER_S = 0.1
"""Time in which the children of a finished command may still write to its output."""
_KILL_PAUSE_S = 0.2
_DROP_PAUSE_S = 0.005
"""Pause between reads of dropped output, so that endless output costs the controller little."""
_AHEAD_BYTES = 1 << 18
"""Size of unread output from which the command has to wait."""
_MAX_LINE_BYTES = 1 << 16
_MARK_TOP = 1 << 40
_WORD_BYTES = 3
_NO_FILE, _FOLDER, _SIGXFSZ = 2, 3, 153
_FULL = ("No space left", "File too large", "quota exceeded")
_NUL = ["sh", "-c", "echo 'swerl: an argument contains a null byte' >&2; exit 126"]

WaitForExit = Callable[[int | None], Awaitable[int]]
"""Waits until the provider reports a command's end; returns its exit code. The argument is the code
that the shell around the command printed, if it did: the command could have printed it."""


def labels(name: str, lifetime_s: float) -> dict[str, str]:
    """Return the labels by which a sandbox is found after its owner's death."""
    return {
        NAME: name,
        "swerl.owner": f"{socket.gethostname()}:{os.getpid()}",
        "swerl.deadline": str(int(time.time() + lifetime_s)),
    }


class ExecStream(Protocol):
    """A pipe to a process in a container or pod."""

    async def read(self) -> tuple[bytes, bool] | None:
        """Return the next piece of output, and whether it is stderr; None at the end."""

    async def send(self, data: bytes) -> None:
        """Write to its input. Raises ConnectionError if that is closed."""

    def end_input(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A shell script to start in a machine."""

    script: str
    words: Sequence[str]
    """Its arguments."""
    environment: Mapping[str, str]
    as_root: bool = False
    """Whether it changes from the ordinary user to root."""


class MachineSandbox(ABC):
    """A sandbox in a container or pod. A backend starts programs in it and removes it."""

    def __init__(self, name: str, limits: Limits, workdir: str) -> None:
        self.id = name
        self._limits = limits
        self._workdir = workdir
        self._ready: SignallerReady
        self._signaller: Signaller | None = None
        self._root_signaller: Signaller | None = None
        self._lost: asyncio.Future[SandboxLostError] = asyncio.get_running_loop().create_future()
        """Set when it is gone, to the reason."""
        self._last_mark = _MARK_TOP
        self._running: set[MachineProcess] = set()
        self._relays = AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._removing: asyncio.Task[None] | None = None

    # What a backend provides.

    @abstractmethod
    async def _open_exec(self, request: ExecRequest) -> tuple[ExecStream, WaitForExit]:
        """Start a script; return its stream, and a function that waits for its end."""

    @abstractmethod
    async def _require_running(self) -> None:
        """Raise SandboxLostError if the provider reports that the machine has ended."""

    @abstractmethod
    async def _is_crowded(self, detail: str) -> bool:
        """Return whether its limits leave too little for a new command."""

    @abstractmethod
    async def _remove_machine(self) -> None: ...

    # The sandbox.

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
        as_root = self._is_root(user)
        started = time.monotonic()
        output = CappedOutput()
        process = await self._launch(argv, cwd=cwd, env=env, as_root=as_root)
        code = await self._finish(process, output, timeout_s, stdin or b"")
        duration_s = time.monotonic() - started
        if code is None:
            return output.result(TIMED_OUT, duration_s, timed_out=True)
        return output.result(code, duration_s)

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[MachineProcess]:
        as_root = self._is_root(user)
        process = await self._launch(argv, cwd=cwd, env=env, as_root=as_root)
        try:
            yield process
        finally:
            try:
                with suppress(SandboxLostError):  # then the command is gone too
                    await asyncio.shield(self._kill(process))
            finally:
                self._forget(process)

    async def read(self, path: str) -> bytes:
        require_path("read", path, self.id)
        code, data, detail = await self._move(scripts.READ, path, b"")
        if code == _NO_FILE:
            raise FileNotFoundError(_NO_FILE, os.strerror(_NO_FILE), path)
        if code:
            raise self._file_error("read", path, code, detail)
        return data

    async def write(self, path: str, data: bytes) -> None:
        require_path("write", path, self.id)
        code, _, detail = await self._move(scripts.WRITE, path, data)
        if code:
            raise self._file_error("write", path, code, detail)

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable by a relay over the stream of a command; return its URL."""
        self._require_alive()
        relay = open_relay(
            self,
            listener,
            on_lost=lambda error: self._lose(str(error), from_inside=error.from_inside),
        )
        return await self._relays.enter_async_context(relay)

    async def close(self) -> None:
        """Remove the machine and release all resources. Safe to call twice. Raises SandboxError."""
        try:
            await self._end("it is closed")
        finally:
            await self._relays.aclose()

    # Its start and its end.

    async def _until_ready(self, stream: ExecStream, hint: str) -> SignallerReady:
        """Wait for the signaller that the machine's first process started. Raises SandboxError."""
        self._signaller = signaller = Signaller(
            stream, lambda: self._in_background(self._explain_end())
        )
        await asyncio.wait([signaller.ready], timeout=_BOOT_TIMEOUT_S)
        if not signaller.ready.done():
            raise SandboxError(
                f"sandbox {self.id} is not ready after {_BOOT_TIMEOUT_S:.0f} s",
                hint="its machine is busy; open fewer sandboxes at once",
            )
        ready = signaller.ready.result()
        if ready is None:
            raise SandboxError(f"sandbox {self.id} ended as it started", hint=hint)
        self._ready = ready
        self._in_background(self._end_in_time())
        return ready

    async def _end_in_time(self) -> None:
        await asyncio.sleep(self._limits.lifetime_s)
        await self._end("its lifetime is over")

    @abstractmethod
    async def _explain_end(self) -> None:
        """Find out why the stream of its first process ended, and end it for this reason."""

    async def _end(self, reason: str, *, from_inside: bool = False) -> None:
        """Note that it is gone, and remove the machine once. Raises SandboxError."""
        self._lose(reason, from_inside=from_inside)
        if self._removing is None:
            self._removing = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._removing)

    def _lose(self, reason: str, *, from_inside: bool = False) -> None:
        """Note that it is gone; the first reason counts. See SandboxError for `from_inside`."""
        if self._lost.done():
            return
        message = f"sandbox {self.id} is gone: {reason}"
        lost = SandboxLostError(message, hint="open a new sandbox", from_inside=from_inside)
        self._lost.set_result(lost)
        for process in list(self._running):
            process.lose(lost)
            self._forget(process)

    async def _remove(self) -> None:
        try:
            await self._remove_machine()
        finally:
            for task in list(self._tasks):
                task.cancel()
            for signaller in (self._signaller, self._root_signaller):
                if signaller:
                    await signaller.close()

    def _require_alive(self) -> None:
        if self._lost.done():
            raise self._lost.result()

    async def _require_alive_soon(self, within_s: float = LOSS_TIMEOUT_S) -> None:
        """Raise SandboxLostError if it is gone, or is reported gone within `within_s`."""
        await asyncio.wait([self._lost], timeout=within_s)
        self._require_alive()

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a task that is cancelled when the machine is removed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Commands.

    def _is_root(self, user: str | None) -> bool:
        """Return whether this user is root. Raises SandboxError if there is no such user."""
        if user in ("root", "0"):
            return True
        if user in (None, self._ready.user_name, str(self._ready.user_id)):
            return self._ready.user_id == 0
        raise SandboxError(
            f"no user {user!r} in sandbox {self.id}",
            hint="use `root`, or None for the image's own user",
        )

    async def _launch(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        as_root: bool = False,
    ) -> MachineProcess:
        """Start a command. Raises SandboxLostError, or SandboxError at the process limit."""
        self._require_alive()
        name = self._ready.user_name
        self._last_mark -= 1
        token, mark = secrets.token_hex(16), self._last_mark
        words = _NUL if any("\0" in word for word in argv) else argv
        request = ExecRequest(
            scripts.COMMAND,
            [token, str(mark), cwd or self._workdir, *words],
            {**(ROOT_ENV if as_root else {"USER": name, "LOGNAME": name}), **(env or {})},
            as_root=as_root and self._ready.user_id != 0,
        )
        starting = asyncio.ensure_future(self._start(request, token, mark))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._in_background(self._undo(starting))
            raise

    async def _start(self, request: ExecRequest, token: str, mark: int) -> MachineProcess:
        stream, wait_for_exit = await self._open_exec(request)
        process = MachineProcess(
            stream,
            token.encode(),
            send_signal=lambda name: self._send_signal(name, mark, as_root=request.as_root),
            wait_for_exit=wait_for_exit,
            explain_cut=lambda text: self._explain_cut(wait_for_exit, text),
        )
        self._running.add(process)
        if self._lost.done():
            process.lose(self._lost.result())
        await asyncio.wait([process.begun], timeout=_BEGIN_TIMEOUT_S)
        if not process.begun.done():  # an agent may stop every new process
            await self._end("a command did not start")
            self._require_alive()
        return process

    async def _undo(self, starting: asyncio.Task[MachineProcess]) -> None:
        with suppress(SandboxError):
            await self._kill_and_forget(await starting)

    async def _finish(
        self, process: MachineProcess, output: CappedOutput, timeout_s: float | None, stdin: bytes
    ) -> int | None:
        """Follow a command to its end; return its exit code, or None if the timeout ended it."""
        feeding = asyncio.ensure_future(_feed(process, stdin))
        try:
            code = await _follow(process, output, timeout_s)
        except asyncio.CancelledError:
            self._in_background(self._kill_and_forget(process))
            raise
        finally:
            feeding.cancel()
        if code is None:
            await asyncio.shield(self._kill(process))
            with suppress(SandboxLostError):  # the kill failed: the result is still a timeout
                await process.wait()
            await process.collect(output)
        self._forget(process)
        return code

    async def _kill(self, process: MachineProcess) -> None:
        """Kill a command; if that fails, end the sandbox.

        Raises SandboxLostError if the sandbox was gone before.
        """
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.kill()
        except TimeoutError:
            await self._end("a command did not die when it was killed")

    async def _kill_and_forget(self, process: MachineProcess) -> None:
        with suppress(SandboxError):
            await self._kill(process)
        self._forget(process)

    def _forget(self, process: MachineProcess) -> None:
        """Close a command's streams; processes that it left behind keep running."""
        self._running.discard(process)
        process.close()

    async def _send_signal(self, name: str, mark: int, *, as_root: bool) -> None:
        self._require_alive()
        try:
            signaller = await self._signaller_of_root() if as_root else self._signaller
            assert signaller
            await signaller.send(f"{name} {mark} {self._last_mark} {_MARK_TOP - 1}")
        except ConnectionError as error:
            await self._require_alive_soon()
            await self._end("its signaller is gone")
            raise self._lost.result() from error

    async def _signaller_of_root(self) -> Signaller:
        """Return the signaller of root's commands: no other user may signal them."""
        if self._root_signaller is None:
            request = ExecRequest(scripts.SIGNALLER, [self._workdir], {}, as_root=True)
            stream, _ = await self._open_exec(request)
            self._root_signaller = Signaller(stream, self._drop_root_signaller)
        return self._root_signaller

    def _drop_root_signaller(self) -> None:
        self._root_signaller = None

    async def _explain_cut(self, wait_for_exit: WaitForExit, text: bytes) -> int:
        """Return the exit code of a command whose stream broke. Raises SandboxLostError if the
        command keeps running."""
        await self._require_alive_soon(_CUT_TIMEOUT_S)
        if text.startswith(b"OCI runtime exec failed"):
            raise await self._refusal(text.decode("utf-8", "replace"))
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                code = await wait_for_exit(None)
                await self._require_running()  # the end of its machine kills a command, too
                return code
        except TimeoutError:
            await self._end("the stream of a command broke")
            raise self._lost.result() from None

    async def _refusal(self, detail: str) -> SandboxError:
        """Return the error for a command that cannot start."""
        message = f"sandbox {self.id} cannot start a command: {detail.strip()[:300]}"
        hint = "its processes may use up its limits; raise num_processes or memory_mib"
        return SandboxError(message, hint=hint, from_inside=await self._is_crowded(detail))

    # Files.

    async def _move(self, script: str, path: str, data: bytes) -> tuple[int, bytes, str]:
        """Run a script on a file, and again as root if the ordinary user has no permission."""
        command = ["/bin/sh", "-c", script, "sh", str(PurePosixPath("/", path))]
        for as_root in [False] if self._ready.user_id == 0 else [False, True]:
            output = CappedOutput(sys.maxsize)
            process = await self._launch(command, cwd="/", env={"LC_ALL": "C"}, as_root=as_root)
            code = await self._finish(process, output, _FILE_TIMEOUT_S, data)
            detail = output.stderr.decode("utf-8", "replace").strip()
            if not (code and "ermission denied" in detail):
                break
        return TIMED_OUT if code is None else code, bytes(output.stdout), detail

    def _file_error(self, verb: str, path: str, code: int, detail: str) -> SandboxError:
        if code == TIMED_OUT:
            message = f"cannot {verb} {path} in sandbox {self.id} in {_FILE_TIMEOUT_S:g} s"
            return SandboxError(message, hint="see the provider's log")
        is_full = code == _SIGXFSZ or any(words in detail for words in _FULL)
        is_folder = code == _FOLDER
        reason = "it is a folder" if is_folder else detail.rpartition(": ")[2] or f"code {code}"
        hint = "raise the limit disk_mib" if is_full else ""
        return file_error(verb, path, self.id, reason, is_folder=is_folder, hint=hint)


async def _follow(
    process: MachineProcess, output: CappedOutput, timeout_s: float | None
) -> int | None:
    """Read a command's output to its end; return its exit code, or None at the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await process.collect(output)
            return await process.wait()
    except TimeoutError:
        if not await process.ended_in_time():
            return None
        await process.collect(output)
        return await process.wait()


async def _feed(process: MachineProcess, data: bytes) -> None:
    with suppress(SandboxError):  # it closed its input
        if data:
            await process.send(data)
        await process.end_input()


class MachineProcess:
    """A running command of a MachineSandbox.

    The shell around it prints a token and a word of three bytes: `run` on standard output when the
    command starts, its exit code there and `end` on both streams when it ends. Only the provider
    decides that a command has ended, because the command could print the words itself.
    """

    def __init__(
        self,
        stream: ExecStream,
        token: bytes,
        *,
        send_signal: Callable[[str], Awaitable[None]],
        wait_for_exit: WaitForExit,
        explain_cut: Callable[[bytes], Awaitable[int]],
    ) -> None:
        self._stream = stream
        self._send_signal = send_signal
        self._wait_for_exit = wait_for_exit
        self._explain_cut = explain_cut
        self._concluding: asyncio.Task[None] | None = None
        self._frames = {is_stderr: _Frame(b"\0" + token) for is_stderr in (False, True)}
        self._chunks: deque[Chunk] = deque()
        self._waiting_bytes = 0
        self._is_bounded = True
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._input_open = True
        self._printed_code: int | None = None
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done when signals reach it."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit code."""
        self._pump = asyncio.ensure_future(self._run())
        self._pump.add_done_callback(self._finish)

    async def output(self) -> AsyncIterator[Chunk]:
        while chunk := await self._next():
            yield chunk

    async def send(self, data: bytes) -> None:
        if not self._input_open or self.ended.done():
            raise closed_input()
        try:
            await self._stream.send(data)
        except ConnectionError as error:
            raise closed_input() from error

    async def end_input(self) -> None:
        if self._input_open:
            self._input_open = False
            self._stream.end_input()

    async def signal(self, number: int) -> None:
        try:
            name = signal.Signals(number).name.removeprefix("SIG")
        except ValueError as error:
            raise SandboxError(
                f"there is no signal {number}", hint="use one of Python's signal.Signals"
            ) from error
        if not self.ended.done():
            await self._send_signal(name)

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def ended_in_time(self) -> bool:
        """Return whether it has ended; waits a while if only the provider's report is late."""
        if self._concluding:
            await asyncio.wait([self.ended], timeout=_REPORT_S)
        return self.ended.done()

    async def collect(self, output: CappedOutput) -> None:
        """Read its output to the end; safe to cancel and to call again."""
        while chunk := await self._next():
            if not output.add(chunk):
                await asyncio.sleep(_DROP_PAUSE_S)

    async def kill(self) -> None:
        """Kill it and all processes that it started, and wait until it has ended."""
        self._is_bounded = False
        self._room.set()
        while True:
            await self._send_signal("KILL")
            if (await asyncio.wait([self.ended], timeout=_KILL_PAUSE_S))[0]:
                return

    def lose(self, error: SandboxLostError) -> None:
        self._fail(error)
        self._pump.cancel()

    def close(self) -> None:
        """Close its streams; processes that it left behind keep running."""
        self._pump.cancel()
        self._stream.close()

    async def _run(self) -> None:
        ends: set[bool] = set()
        while piece := await self._stream.read():
            if self._take(*piece):
                ends.add(piece[1])
            if len(ends) == len(self._frames) and self._concluding is None:
                self._concluding = asyncio.ensure_future(self._conclude())
            while self._is_bounded and self._waiting_bytes > _AHEAD_BYTES:
                self._room.clear()
                await self._room.wait()
        if self._concluding:
            await asyncio.wait([self.ended])
        else:
            self._end(await self._explain_cut(b"".join(chunk.data for chunk in self._chunks)))

    async def _conclude(self) -> None:
        """Wait for the end that its streams announced; then stop reading them."""
        try:
            self._end(await self._wait_for_exit(self._printed_code))
        except SandboxError as error:
            self._fail(error)
        await asyncio.sleep(_LINGER_S)
        self._pump.cancel()

    def _take(self, data: bytes, is_stderr: bool) -> bool:
        """Take a piece of output; return whether it announces the end of its stream."""
        text, words = self._frames[is_stderr].take(data)
        if text:
            self._chunks.append(Chunk(text, is_stderr))
            self._waiting_bytes += len(text)
            self._changed.set()
        if words and not self.begun.done():
            self.begun.set_result(None)
        for word in filter(str.isdigit, words):
            self._printed_code = int(word)
        return "end" in words

    async def _next(self) -> Chunk | None:
        while not self._chunks:
            if self._pump.done():
                return None
            self._changed.clear()
            await self._changed.wait()
        chunk = self._chunks.popleft()
        self._waiting_bytes -= len(chunk.data)
        self._room.set()
        return chunk

    def _end(self, code: int) -> None:
        self._input_open = False
        if not self.ended.done():
            self.ended.set_result(code)

    def _fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # the caller may not wait for it

    def _finish(self, pump: asyncio.Task[None]) -> None:
        if self._concluding:
            self._concluding.cancel()
        if not pump.cancelled() and (error := pump.exception()):
            self._fail(error)
        if not self.begun.done():
            self.begun.set_result(None)
        self._changed.set()


class _Frame:
    """Removes the words of the shell around a command from one of its streams."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._rest = b""

    def take(self, data: bytes) -> tuple[bytes, list[str]]:
        """Return the command's own bytes in `data`, and the words."""
        data, text = self._rest + data, b""
        words: list[str] = []
        while (start := data.find(self._token)) >= 0:
            text, rest = text + data[:start], data[start + len(self._token) :]
            if len(rest) < _WORD_BYTES:
                self._rest = data[start:]
                return text, words
            words.append(rest[:_WORD_BYTES].decode("ascii", "replace"))
            data = rest[_WORD_BYTES:]
        size = _overlap(data, self._token)
        self._rest = data[len(data) - size :]
        return text + data[: len(data) - size], words


def _overlap(data: bytes, token: bytes) -> int:
    """Return the number of bytes at the end of `data` that may be the start of `token`."""
    tail = data[-(len(token) - 1) :]
    start = tail.find(token[:1])
    while start >= 0:
        if token.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(token[:1], start + 1)
    return 0


@dataclass(frozen=True, slots=True)
class SignallerReady:
    """The first line of the signaller."""

    user_id: int
    group_id: int
    user_name: str
    has_workdir: bool


class Signaller:
    """The controller's connection to a running signaller."""

    def __init__(self, stream: ExecStream, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self.ready: asyncio.Future[SignallerReady | None] = (
            asyncio.get_running_loop().create_future()
        )
        """Its first line; None if it ended before."""
        self._listening = asyncio.ensure_future(self._listen())

    async def send(self, request: str) -> None:
        """Send a request and wait for its answer. Raises ConnectionError."""
        number = next(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = request, answer
        try:
            await self._stream.send(f"{number} {request}\n".encode())
            await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Close its input: it ends, and its machine with it."""
        self._listening.cancel()
        self._stream.close()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        text = b""
        try:
            while piece := await self._stream.read():
                *lines, text = (text + piece[0]).split(b"\n")
                for line in lines:
                    await self._read(line.decode("ascii", "replace").split())
                text = text[-_MAX_LINE_BYTES:]
        finally:
            if not self.ready.done():
                self.ready.set_result(None)
            for _, answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError("the signaller is gone"))
                    answer.exception()  # the caller may not wait for it
            self._on_end()

    async def _read(self, words: list[str]) -> None:
        if words[:1] == ["ready"] and len(words) == 5:
            if not self.ready.done():
                _, user_id, group_id, name, workdir = words
                ready = SignallerReady(int(user_id), int(group_id), name, workdir == "yes")
                self.ready.set_result(ready)
            # an agent may have killed the signaller before this one, with its requests
            for number, (request, _) in list(self._waiting.items()):
                await self._stream.send(f"{number} {request}\n".encode())
        elif words[:1] == ["done"] and words[1:] and words[1].isdigit():
            _, answer = self._waiting.get(int(words[1]), ("", None))
            if answer and not answer.done():
                answer.set_result(None)
