"""One open sandbox of the `e2b` backend: its commands and files.

A command is one of the SDK's background commands. If its stream breaks, it is lost, and so is the
sandbox: the Episode is repeated. The SDK runs every command in a login shell; a short prologue
drops what the shell's profile printed and set.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import (
    TIMED_OUT,
    CappedOutput,
    Chunk,
    Exec,
    Mount,
    closed_input,
    file_error,
    require_path,
)
from swerl.sandboxes._e2b_sdk import CutError, E2BProvider, RemoteCommand, RemoteSandbox
from swerl.sandboxes._packed import packed_folder
from swerl.sandboxes._relay import open_relay

T = TypeVar("T")

_CANNOT_RUN = 126
_MAX_SCRIPT_BYTES = 100_000
"""Largest script on a command line; the kernel's limit is 128 KiB for one argument."""
_PIECE_BYTES = 1 << 20
_WAITING_CHUNKS = 64
"""Pieces of unread output from which the stream waits."""
_OVERTIME_S = 15.0
"""Seconds in which the end of a killed command must arrive."""
_INLINE_BYTES = 1 << 20
"""Largest file that is read by a command; the provider transfers larger ones."""
_MAX_FILE_BYTES = 256 << 20
"""Largest file that is read: a sparse one may be larger than any disk."""
_SIGNAL_S = 10.0
_SETUP_S = 300.0
_GRACE_S = 60.0
"""Seconds beyond a sandbox's lifetime in which its provider has to report the end."""
_ABSENT, _NOT_PLAIN, _FULL, _FOLDER, _LARGE, _HUGE = 44, 45, 46, 47, 48, 49
_PROLOGUE = """\
mapfile -d '' -t swerl </proc/$$/environ
cd -- {cwd} 2>/dev/null || swerl_cwd=missing
printf '%s\\n' {mark}; printf '%s\\n' {mark} >&2
[ -z "$swerl_cwd" ] || {{ echo "swerl: cannot run in the folder "{cwd} >&2; exit 126; }}
exec env -i -- "${{swerl[@]}}" {words}
"""
"""The environment is the one before the profile ran. Output counts from the mark on."""
_LOOK = """
id -un; id -u; id -g; test -d "$1" && test -w "$1" && echo writable; shift
for target; do
  test -n "$(ls -A -- "$target" 2>/dev/null)" || printf 'absent %s\\n' "$target"
done; :
"""
_OWN_WORKDIR = """
mkdir -p -- "$1" || exit
chown -R "$2" -- "$1" 2>/dev/null # if root may not, there is one user only
command -v git >/dev/null || exit 0
git config --system --replace-all safe.directory '*' '^[*]$'; :
"""
_UNPACK = """
mkdir -p -- "$2" && tar -xzf "$1" -C "$2" --no-same-owner && chmod -R a+rX,a-w -- "$2"
code=$?; rm -f -- "$1"; exit $code
"""
_SIGNAL = """
tree() {
  for file in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$file" || continue
    set -- "$1" ${line##*) }
    [ "$3" != "$1" ] || { kid=${file#/proc/}; tree ${kid%/stat}; }
  done
  echo "$1"
}
[ "$2" != 9 ] || kill -STOP "$1"
for pid in $(tree "$1"); do
  [ "$2" = 9 ] && [ "$pid" = "$1" ] || kill "-$2" "$pid"
done 2>/dev/null; :
"""
"""Sends a signal to a command and all below it. For SIGKILL it only stops the command itself, which
the provider then kills: swerl's own server ends the daemons, too."""
_READ = f"""
[ -e "$1" ] || exit {_ABSENT}
[ ! -d "$1" ] || exit {_FOLDER}
[ -f "$1" ] || exit {_NOT_PLAIN}
size=$(stat -L -c %s -- "$1")
[ "$size" -le {_MAX_FILE_BYTES} ] || exit {_HUGE}
[ "$size" -le {_INLINE_BYTES} ] || exit {_LARGE}
exec head -c {_INLINE_BYTES} -- "$1"
"""
_WRITE = f"""
[ ! -d "$1" ] || exit {_FOLDER}
if [ -e "$1" ] && [ ! -f "$1" ]; then exit {_NOT_PLAIN}; fi
folder=${{1%/*}} top=${{1%/*}} new=
while [ ! -e "${{top:-/}}" ]; do new=$top; top=${{top%/*}}; done
[ -e "$1" ] || new=${{new:-$1}}
mkdir -p -- "${{folder:-/}}" || exit
cat >"$1" || exit {_FULL}
[ -z "$new" ] || chown -R -- "$2" "$new" 2>/dev/null; : # if root may not, there is one user only
"""


class E2BSandbox:
    """A sandbox at an E2B-compatible provider."""

    def __init__(
        self,
        provider: E2BProvider,
        remote: RemoteSandbox,
        *,
        workdir: str,
        lifetime_s: float,
    ) -> None:
        self.id = remote.id
        self._provider = provider
        self._remote = remote
        self._workdir = workdir
        self._lifetime_s = lifetime_s
        self._name = ""
        """Name of the ordinary user; `set_up` finds it out."""
        self._owner = "0:0"
        self._mounted: list[PurePosixPath] = []
        self._is_set_up = False
        """Whether the image can run commands. Later failures come from inside."""
        self._open = AsyncExitStack()
        self._is_gone = False
        self._ends_at = time.monotonic() + lifetime_s
        loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[SandboxLostError] = loop.create_future()
        # Also if the provider answers nothing any more: a stopped server keeps its connections.
        late = loop.call_later(lifetime_s + _GRACE_S, lambda: self._fail(self._end()))
        self._lost.add_done_callback(lambda _: late.cancel())

    async def set_up(self, mounts: Sequence[Mount]) -> None:
        """Give the workdir to the ordinary user, and upload the mounts that the image lacks."""
        targets = [mount.target for mount in mounts]
        look = ["sh", "-c", _LOOK, "swerl", self._workdir, *targets]
        result = await self.run(look, cwd="/", timeout_s=_SETUP_S)
        name, uid, gid, *facts = [*result.stdout.decode().splitlines(), "", "", ""]
        if not uid.isdigit():
            raise SandboxError(
                f"sandbox {self.id} does not run commands: {result.text.strip()[-300:]}",
                hint="the image needs sh, bash and coreutils",
            )
        self._name, self._owner = name, f"{uid}:{gid}"
        if "writable" not in facts:
            await self._as_root(_OWN_WORKDIR, self._workdir, self._owner)
        for mount in mounts:
            if f"absent {mount.target}" in facts:
                packed = await asyncio.to_thread(packed_folder, mount)
                path = f"/tmp/.swerl-{secrets.token_hex(8)}.tgz"
                with packed.open("rb") as file:
                    await self.asked(self._remote.upload(path, file))
                await self._as_root(_UNPACK, path, mount.target)
            self._mounted.append(PurePosixPath(mount.target))
        self._is_set_up = True

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
        started = time.monotonic()
        if refusal := _refusal(argv, cwd, env):
            return Exec(_CANNOT_RUN, b"", refusal)
        output = CappedOutput()
        command = self.start(argv, cwd=cwd, env=env, user=user, takes_input=stdin is not None)
        async with command as process:
            ending = asyncio.ensure_future(_finished(process, output, stdin))
            try:
                timed_out = not (await asyncio.wait([ending], timeout=timeout_s))[0]
                if timed_out:
                    await process.signal(signal.SIGKILL)
                async with asyncio.timeout(_OVERTIME_S if timed_out else None):
                    code = await ending
            except TimeoutError as error:
                message = f"sandbox {self.id} is gone: a killed command did not end"
                self._fail(SandboxLostError(message, hint="open a new sandbox"))
                raise self._lost.result() from error
            finally:
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)
        code = TIMED_OUT if timed_out else code
        return output.result(code, time.monotonic() - started, timed_out=timed_out)

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        takes_input: bool = True,
    ) -> AsyncIterator[E2BProcess]:
        if refusal := _refusal(argv, cwd, env):
            raise SandboxError(refusal.decode().strip(), hint="give a command to run")
        if user not in (None, "root", self._name):
            hint = f"the users are `{self._name}` and `root`"
            raise SandboxError(f"no user {user!r} in sandbox {self.id}", hint=hint)
        process = E2BProcess(self, "root" if user == "root" else None, takes_input=takes_input)
        try:
            await process.begin(self._remote, argv, cwd or self._workdir, env or {})
            yield process
        finally:
            await asyncio.shield(process.close())

    async def read(self, path: str) -> bytes:
        return await self._file_command("read", path, _READ)

    async def write(self, path: str, data: bytes) -> None:
        where = PurePosixPath("/") / path
        for mounted in self._mounted:
            if where.is_relative_to(mounted):
                hint = "write to a folder outside the mounts"
                raise file_error("write", path, self.id, f"{mounted} is read-only", hint=hint)
        await self._file_command("write", path, _WRITE, data)

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there."""
        return await self._open.enter_async_context(open_relay(self, listener, on_lost=self._fail))

    def lose(self, error: SandboxLostError) -> None:
        """Make all its requests fail with this error, because its provider is gone."""
        self._is_gone = True
        self._fail(error)

    async def close(self) -> None:
        """End the sandbox at its provider. Safe to call twice. Raises SandboxError if the provider
        refuses; the sandbox then runs until its lifetime is over."""
        self._fail(SandboxLostError(f"sandbox {self.id} is closed", hint="open a new one"))
        await self._open.aclose()
        if self._is_gone:
            return
        for pause in (0.2, 1.0, 3.0):
            try:
                return await self._provider.kill(self.id)
            except CutError:
                await asyncio.sleep(pause)
        await self._provider.kill(self.id)

    async def asked(self, request: Coroutine[object, object, T]) -> T:
        """Return the provider's answer. If the connection breaks, the sandbox is lost."""
        try:
            return await self.unless_lost(request)
        except SandboxError as error:
            error.from_inside &= self._is_set_up
            if isinstance(error, SandboxLostError):
                self._fail(error)
            elif isinstance(error, CutError):
                self._fail(await self._reason(error))
            else:
                raise
            raise self._lost.result() from error

    async def _reason(self, error: CutError) -> SandboxLostError:
        """Return why the connection to the sandbox broke."""
        try:
            if not await self._provider.exists(self.id):
                return self._end()
        except SandboxError:
            pass  # the provider cannot be reached
        return SandboxLostError(str(error), hint=error.hint)

    async def unless_lost(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of `work`. Raises SandboxLostError as soon as the sandbox is lost."""
        if self._lost.done():
            work.close()
            raise self._lost.result()
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._lost.result()
            return task.result()
        finally:
            task.cancel()  # does nothing if it has ended
            await asyncio.gather(task, return_exceptions=True)

    def _fail(self, error: SandboxLostError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)

    def _end(self) -> SandboxLostError:
        over = time.monotonic() >= self._ends_at
        why = f"its lifetime of {self._lifetime_s:g} s is over" if over else "it was killed outside"
        hint = "raise budgets.sandbox_s" if over else "open a new sandbox"
        return SandboxLostError(f"sandbox {self.id} is gone: {why}", hint=hint)

    async def _as_root(self, script: str, *arguments: str) -> None:
        argv = ["sh", "-c", script, "swerl", *arguments]
        result = await self.run(argv, cwd="/", user="root", timeout_s=_SETUP_S)
        if result.exit_code:
            message = f"cannot prepare sandbox {self.id}: {result.text.strip()[-300:]}"
            raise SandboxError(message, hint="the template needs a user root, and disk space")

    async def _file_command(
        self, verb: str, path: str, script: str, data: bytes | None = None
    ) -> bytes:
        """Run a script that reads or writes a file; return its output. Raises its error."""
        require_path(verb, path, self.id, errors="strict")
        path, output = f"/{path.removeprefix('/')}", CappedOutput(_INLINE_BYTES)
        argv = ["sh", "-c", script, "swerl", path, self._owner]
        command = self.start(argv, cwd="/", user="root", takes_input=data is not None)
        async with command as process:
            code = await _finished(process, output, data)
        if code == 0:
            return bytes(output.stdout)
        if code == _LARGE:
            return await self.asked(self._remote.download(path))
        if code == _ABSENT:
            raise FileNotFoundError(f"no file {path} in sandbox {self.id}")
        detail = output.stderr.decode(errors="replace").strip()[-200:]
        why = {
            _NOT_PLAIN: "it is no plain file",
            _FOLDER: "it is a folder",
            _HUGE: f"it is larger than {_MAX_FILE_BYTES >> 20} MiB",
        }.get(code, detail)
        hint = "raise disk_mib, or the template's disk" if "space" in detail else ""
        raise file_error(verb, path, self.id, why, is_folder=code == _FOLDER, hint=hint)


class E2BProcess:
    """A running command of an `e2b` sandbox."""

    def __init__(self, sandbox: E2BSandbox, user: str | None, *, takes_input: bool) -> None:
        self._sandbox = sandbox
        self._user = user
        self._mark = f"swerl-{secrets.token_hex(8)}"
        """The line after which a stream is the command's own output."""
        self._command: RemoteCommand | None = None
        self._prologue: list[bytes | None] = [b"", b""]
        """Output before the mark, of each stream; None after it."""
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(_WAITING_CHUNKS)
        self._launched: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._follower: asyncio.Task[None] | None = None
        self._input_ended = not takes_input

    async def begin(
        self, remote: RemoteSandbox, argv: Sequence[str], cwd: str, env: Mapping[str, str]
    ) -> None:
        """Start a command; return once it runs. Raises SandboxError."""
        if "=" in argv[0]:  # `env` would take it for a variable
            argv = ["sh", "-c", 'exec "$@"', "sh", *argv]
        words = shlex.join([*(f"{name}={value}" for name, value in env.items()), *argv])
        script = _PROLOGUE.format(cwd=shlex.quote(cwd), mark=self._mark, words=words)
        # A long script, or one that may be no Unicode, travels as input.
        data = script.encode("utf-8", "surrogateescape")
        is_sent = len(data) > _MAX_SCRIPT_BYTES or not script.isascii()
        command = self._command = await self._sandbox.asked(
            remote.start(
                f'eval "$(head -c {len(data)})"' if is_sent else script,
                user=self._user,
                takes_input=is_sent or not self._input_ended,
                streams=(partial(self._receive, 0), partial(self._receive, 1)),
            )
        )
        if is_sent:
            await self._sandbox.asked(command.send(data))
            if self._input_ended:
                with suppress(SandboxError):  # it has just ended
                    await self._sandbox.unless_lost(command.end_input())
        self._follower = asyncio.ensure_future(self._follow(command))
        either: set[asyncio.Future[Any]] = {self._launched, self._code}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._code.done():
            self._code.result()

    async def output(self) -> AsyncIterator[Chunk]:
        while chunk := await self._chunks.get():
            yield chunk
        self._chunks.put_nowait(None)

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            await self._input(self._writable().send(data[start : start + _PIECE_BYTES]))

    async def end_input(self) -> None:
        if not self._input_ended and not self._code.done():
            with suppress(SandboxError):  # it has just ended
                await self._input(self._writable().end_input())
        self._input_ended = True

    async def signal(self, number: int) -> None:
        if number not in range(1, signal.NSIG):
            hint = f"signals are 1 to {signal.NSIG - 1}"
            raise SandboxError(f"there is no signal {number}", hint=hint)
        if self._code.done() or self._command is None:
            return
        argv = ["sh", "-c", _SIGNAL, "swerl", str(self._command.pid), str(number)]
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_SIGNAL_S):
                await self._sandbox.run(argv, cwd="/", user=self._user)
        if number == signal.SIGKILL:
            # Also if there was no process left for the script.
            await self._sandbox.asked(self._command.kill())

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def close(self) -> None:
        """Kill the command and all that it started, unless it has ended."""
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_OVERTIME_S):
                await self.signal(signal.SIGKILL)
        if self._command:
            await self._command.disconnect()
        if self._follower:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)

    async def _follow(self, command: RemoteCommand) -> None:
        """Wait for the command's end."""
        try:
            self._code.set_result(await self._sandbox.asked(command.wait()))
        except SandboxError as error:
            self._code.set_exception(error)
            self._code.exception()  # the caller may not wait for it
        finally:
            if not self._code.done():
                self._code.cancel()
                if self._chunks.full():
                    self._chunks.get_nowait()
                self._chunks.put_nowait(None)
        await self._chunks.put(None)

    async def _receive(self, stream: int, data: bytes) -> None:
        before = self._prologue[stream]
        if before is not None:
            before, mark, data = (before + data).partition(f"{self._mark}\n".encode())
            self._prologue[stream] = None if mark else before[-_MAX_SCRIPT_BYTES:]
            if mark and not self._launched.done():
                self._launched.set_result(None)
        if data:
            await self._chunks.put(Chunk(data, is_stderr=stream == 1))

    def _writable(self) -> RemoteCommand:
        if self._input_ended or self._code.done() or self._command is None:
            raise closed_input()
        return self._command

    async def _input(self, request: Coroutine[Any, Any, None]) -> None:
        try:
            await self._sandbox.unless_lost(request)
        except SandboxLostError:
            raise
        except SandboxError as error:
            raise closed_input() from error


async def _finished(process: E2BProcess, output: CappedOutput, stdin: bytes | None) -> int:
    """Return the exit code of a command that gets this input; keep its output."""

    async def feed() -> None:
        if stdin is not None:
            with suppress(SandboxError):  # it has ended, or closed its input
                await process.send(stdin)
            await process.end_input()

    feeding = asyncio.ensure_future(feed())
    try:
        async for chunk in process.output():
            output.add(chunk)
        return await process.wait()
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def _refusal(argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> bytes:
    """Return why these arguments cannot be a command; empty if they can."""
    if not argv:
        return b"swerl: the command is empty\n"
    if any("\0" in word for word in (*argv, cwd or "", *(env or {}), *(env or {}).values())):
        return b"swerl: a command cannot contain a null byte\n"
    return b""
