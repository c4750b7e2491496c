"""One open sandbox of the `e2b` backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk, Exec, Mount
from swerl.sandboxes._e2b import mounts as packs
from swerl.sandboxes._e2b.direct import Direct, open_direct
from swerl.sandboxes._e2b.errors import CutError
from swerl.sandboxes._e2b.files import Files
from swerl.sandboxes._e2b.job import Job, Report, Shown
from swerl.sandboxes._e2b.process import E2BProcess
from swerl.sandboxes._e2b.runner import DefiedError, Runner
from swerl.sandboxes._e2b.sdk import Access, Machine, Provider
from swerl.sandboxes._relay import open_relay

T = TypeVar("T")

TIMED_OUT = 124
CANNOT_RUN = 126
_OVERTIME_S = 15.0
"""Seconds after a command's own timeout in which its end must arrive."""
_WORD_S = 5.0
"""Seconds for whoever looks after a server to say why it does not answer."""
_SETUP_TIMEOUT_S = 300.0
_LOOK = """
id -un; id -u; id -g; test -d "$1" && test -w "$1" && echo writable; shift
for each; do test -n "$(ls -A -- "$each" 2>/dev/null)" || printf 'absent %s\\n' "$each"; done; :
"""
_OWN_WORKDIR = """
mkdir -p -- "$1" || exit
chown -R "$2" -- "$1" 2>/dev/null # where root may not, all is one user's anyway
if command -v git >/dev/null; then git config --system --add safe.directory '*'; fi; :
"""


@dataclass(frozen=True, slots=True)
class Habits:
    """What all sandboxes of a backend have in common."""

    user: str | None
    """Name of the ordinary user; None for the template's."""
    output_cap: int
    """Most bytes kept of each of a command's output streams."""
    public_url: str
    """Where the gateway can be reached from outside; empty for the relay."""


class E2BSandbox:
    """A sandbox at an E2B-compatible provider."""

    def __init__(
        self,
        provider: Provider,
        machine: Machine,
        *,
        habits: Habits,
        workdir: str,
        lifetime_s: float,
    ) -> None:
        self.id = machine.id
        self._provider = provider
        self._machine = machine
        self._habits = habits
        self._workdir = workdir
        self._runner = Runner(provider, machine, lifetime_s)
        self._name: str | None = None
        """Name of the ordinary user, once known."""
        self._owner = "0:0"
        self._mounted: list[PurePosixPath] = []
        self._open = AsyncExitStack()
        self._is_gone = False
        self._direct: Direct | None = None

    async def go_direct(self, access: Access) -> None:
        """Ask the server for whole answers, where it is the run's own."""
        self._direct = await self._open.enter_async_context(open_direct(access, self.id))

    async def set_up(self, mounts: Sequence[Mount]) -> None:
        """Give the workdir to the ordinary user, and bring the mounts that the image lacks."""
        targets = [mount.target for mount in mounts]
        look = ["sh", "-c", _LOOK, "swerl", self._workdir, *targets]
        done = await self.run(look, cwd="/", timeout_s=_SETUP_TIMEOUT_S)
        name, uid, gid, *facts = [*done.stdout.decode().splitlines(), "", "", ""]
        if not uid.isdigit():
            raise SandboxError(
                f"sandbox {self.id} does not run commands: {done.text.strip()[-300:]}",
                hint="the image needs sh, bash and coreutils",
            )
        self._name, self._owner = name, f"{uid}:{gid}"
        if "writable" not in facts:
            await self._as_root(["sh", "-c", _OWN_WORKDIR, "swerl", self._workdir, self._owner])
        for mount in mounts:
            if f"absent {mount.target}" in facts:
                pack = await packs.upload(self._runner, self._machine, mount)
                await self._as_root(["sh", "-c", packs.UNPACK, "swerl", pack, mount.target])
            self._mounted.append(PurePosixPath(mount.target))
        self._runner.is_set_up = True

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
        """Run a command to its end; at the timeout its whole process tree is killed."""
        started = time.monotonic()
        if refusal := _refusal(argv, cwd, env):
            return Exec(CANNOT_RUN, b"", refusal)
        if self._direct:
            asked = self._direct.run(
                argv,
                cwd=cwd or self._workdir,
                env=env,
                user=self._user(user),
                timeout_s=timeout_s,
                stdin=stdin,
            )
            return await self._in_time(asked, timeout_s)
        job = Job(
            argv=argv,
            cwd=cwd or self._workdir,
            env=env or {},
            user=self._user(user),
            limit_s=timeout_s,
            cap_bytes=self._habits.output_cap + 1,
            stdin=stdin or b"",
        )
        kept = _Kept(self._habits.output_cap)
        report = await self._finish(job, Shown(kept.take), timeout_s)
        timed_out = report.stopped
        return Exec(
            exit_code=TIMED_OUT if timed_out else report.exit_code,
            stdout=bytes(kept.stdout),
            stderr=bytes(kept.stderr),
            timed_out=timed_out,
            truncated=max(report.sizes) > self._habits.output_cap,
            duration_s=time.monotonic() - started,
        )

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[E2BProcess]:
        """Start a command; leaving the context kills it and everything that it started."""
        if self._runner.ended.done():
            raise self._runner.ended.result()
        if refusal := _refusal(argv, cwd, env):
            raise SandboxError(refusal.decode().strip(), hint="give a command to run")
        job = Job(argv, cwd or self._workdir, env or {}, self._user(user), live=True)
        process = E2BProcess(self._runner, job)
        try:
            await process.begin()
            yield process
        finally:
            await asyncio.shield(process.close())

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError."""
        if self._direct:
            return await self._unless_cut(self._direct.read(path))
        return await self._runner.unless_lost(self._files().read(path))

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its parents."""
        where = PurePosixPath("/") / path
        for mounted in self._mounted:
            if where.is_relative_to(mounted):
                raise SandboxError(
                    f"cannot write {path} in sandbox {self.id}: {mounted} is read-only",
                    hint="write outside of the mounts",
                )
        if self._direct:
            await self._unless_cut(self._direct.write(path, data))
        else:
            await self._runner.unless_lost(self._files().write(path, data))

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there.

        The public way leads to the gateway's own port, where the session's key says whose
        request it is.
        """
        if self._habits.public_url:
            return self._habits.public_url
        relay = open_relay(self, listener, on_lost=self._runner.lose)
        return await self._open.enter_async_context(relay)

    def lose(self, error: SandboxLostError) -> None:
        """Let everything in it fail with this error: its provider is gone, and it with that."""
        self._is_gone = True
        self._runner.lose(error)

    async def close(self) -> None:
        """End the sandbox at its provider. Safe to call twice. Raises SandboxError where the
        provider does not take it; then the sandbox lives until its lifetime is over."""
        closed = SandboxLostError(f"sandbox {self.id} is closed", hint="open a fresh one")
        self._runner.lose(closed)
        await self._open.aclose()
        if not self._is_gone:
            await self._kill()

    async def _kill(self) -> None:
        for pause in (0.2, 1.0, 3.0):
            try:
                await self._provider.kill(self.id)
            except CutError:
                await asyncio.sleep(pause)
            else:
                return
        await self._provider.kill(self.id)

    async def _in_time(self, asked: Coroutine[object, object, Exec], limit_s: float | None) -> Exec:
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s + _OVERTIME_S) as timer:
                return await self._unless_cut(asked)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise SandboxLostError(
                f"sandbox {self.id} is gone: a command did not end {_OVERTIME_S:g} s late",
                hint="open a fresh sandbox",
            ) from error

    async def _unless_cut(self, asked: Coroutine[object, object, T]) -> T:
        """Return an answer. Where the connection broke nobody knows what was done: it is lost."""
        try:
            return await self._runner.unless_lost(asked)
        except CutError as error:
            ended = self._runner.ended
            await asyncio.wait([ended], timeout=_WORD_S)
            raise (
                ended.result() if ended.done() else SandboxLostError(str(error), hint=error.hint)
            ) from error

    async def _finish(self, job: Job, shown: Shown, timeout_s: float | None) -> Report:
        deadline = None if timeout_s is None else timeout_s + _OVERTIME_S
        try:
            async with asyncio.timeout(deadline):
                return await self._runner.unless_lost(self._runner.finish(job, shown))
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(self._runner.abandon(job))
            raise
        except TimeoutError:
            return await asyncio.shield(self._end_late(job, shown))

    async def _end_late(self, job: Job, shown: Shown) -> Report:
        """Kill a command that its supervisor did not: the command may have stopped that.

        Where the sandbox answers it is a timeout like any other. Raises SandboxLostError.
        """
        try:
            answered = await self._runner.abandon(job)
        except DefiedError as error:
            answered = True
            self._runner.lose(error)
        if not answered:
            message = f"sandbox {self.id} is gone: a command did not end {_OVERTIME_S:g} s late"
            lost = SandboxLostError(message, hint="open a fresh sandbox")
            self._runner.lose(lost)
            raise lost
        return Report(TIMED_OUT, stopped=True, sizes=(shown.offsets[0], shown.offsets[1]))

    def _user(self, user: str | None) -> str | None:
        if user in ("root", self._habits.user):
            return user
        if user not in (None, self._name):
            raise SandboxError(
                f"no user {user!r} in sandbox {self.id}",
                hint=f"the users are `{self._name}` and `root`",
            )
        return self._habits.user

    async def _as_root(self, argv: Sequence[str]) -> None:
        done = await self.run(argv, cwd="/", user="root", timeout_s=_SETUP_TIMEOUT_S)
        if done.exit_code:
            raise SandboxError(
                f"cannot prepare sandbox {self.id}: {done.text.strip()[-300:]}",
                hint="the template needs a user root, and room on its disk",
            )

    def _files(self) -> Files:
        return Files(self._runner, self._machine, self._shell, self._owner)

    async def _shell(self, argv: list[str], stdin: bytes, stdin_file: str) -> Exec:
        job = Job(argv, "/", {}, "root", stdin=stdin, stdin_file=stdin_file)
        kept = _Kept(1 << 20)
        report = await self._runner.finish(job, Shown(kept.take))
        return Exec(report.exit_code, bytes(kept.stdout), bytes(kept.stderr))


class _Kept:
    """What is kept of a command's output: its first bytes."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.stdout = bytearray()
        self.stderr = bytearray()

    async def take(self, chunk: Chunk) -> None:
        kept = self.stderr if chunk.is_stderr else self.stdout
        kept += chunk.data[: self._cap - len(kept)]


def _refusal(argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> bytes:
    """Return why these words cannot be a command; empty where they can."""
    if not argv:
        return b"swerl: the command is empty\n"
    if any("\0" in word for word in (*argv, cwd or "", *(env or {}), *(env or {}).values())):
        return b"swerl: a command cannot hold a null byte\n"
    return b""
