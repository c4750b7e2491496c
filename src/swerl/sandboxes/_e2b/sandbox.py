"""One open sandbox of the `e2b` backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TypeVar

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import (
    TIMED_OUT,
    CappedOutput,
    Chunk,
    Exec,
    Mount,
    file_error,
    new_name,
    require_path,
)
from swerl.sandboxes._e2b.direct import Direct, ask, open_direct
from swerl.sandboxes._e2b.files import UNPACK, SandboxFiles, upload_folder
from swerl.sandboxes._e2b.process import E2BProcess
from swerl.sandboxes._e2b.runner import JobOutput, JobResult, Runner, ShellJob, UnkillableError
from swerl.sandboxes._e2b.sdk import CutError, E2BAccess, E2BProvider, RemoteSandbox
from swerl.sandboxes._relay import open_relay

T = TypeVar("T")

CANNOT_RUN = 126
_OVERTIME_S = 15.0
"""Seconds after a command's own timeout in which its end must arrive."""
_EXPLAIN_S = 5.0
"""Seconds in which the owner of a server may report why it does not answer."""
_SETUP_TIMEOUT_S = 300.0
_SNAPSHOT_S = 600.0
"""Seconds for a server to keep a sandbox's files."""
_LOOK = """
id -un; id -u; id -g; test -d "$1" && test -w "$1" && echo writable; shift
for each; do test -n "$(ls -A -- "$each" 2>/dev/null)" || printf 'absent %s\\n' "$each"; done; :
"""
_OWN_WORKDIR = """
mkdir -p -- "$1" || exit
chown -R "$2" -- "$1" 2>/dev/null # if root may not, there is one user only
command -v git >/dev/null || exit 0
git config --system --replace-all safe.directory '*' '^[*]$'; : # once, also after a snapshot
"""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Settings that all sandboxes of a backend share."""

    user: str | None
    """Name of the ordinary user; None: the template's."""
    output_cap: int
    """Largest number of bytes kept of each of a command's output streams."""
    public_url: str
    """URL of the gateway from outside; empty: use the relay."""


class E2BSandbox:
    """A sandbox at an E2B-compatible provider."""

    def __init__(
        self,
        provider: E2BProvider,
        remote: RemoteSandbox,
        *,
        settings: SandboxSettings,
        workdir: str,
        lifetime_s: float,
    ) -> None:
        self.id = remote.id
        self._provider = provider
        self._remote = remote
        self._settings = settings
        self._workdir = workdir
        self._runner = Runner(provider, remote, lifetime_s)
        self._name: str | None = None
        """Name of the ordinary user; `set_up` finds it out."""
        self._owner = "0:0"
        self._mounted: list[PurePosixPath] = []
        self._open = AsyncExitStack()
        self._is_gone = False
        self._direct: Direct | None = None
        self._keeper: E2BAccess | None = None
        self.snapshot_root = ""
        """The folder whose files a snapshot keeps; empty: the server takes none."""

    async def go_direct(self, access: E2BAccess) -> None:
        opened = open_direct(access, self.id, self._remote.token)
        self._direct = await self._open.enter_async_context(opened)

    async def keep_with(self, access: E2BAccess) -> None:
        """Make snapshots possible, at a server that keeps them by name."""
        self._keeper = access
        with suppress(SandboxError):
            self.snapshot_root = await self._runner.unless_lost(ask(access, "GET", self._kept_at))

    async def set_up(self, mounts: Sequence[Mount]) -> None:
        """Give the workdir to the ordinary user, and upload the mounts that the image lacks."""
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
                pack = await upload_folder(self._runner, self._remote, mount)
                await self._as_root(["sh", "-c", UNPACK, "swerl", pack, mount.target])
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
        started = time.monotonic()
        if refusal := _refusal(argv, cwd, env):
            return Exec(CANNOT_RUN, b"", refusal)
        if self._direct:
            request = self._direct.run(
                argv,
                cwd=cwd or self._workdir,
                env=env,
                user=self._user(user),
                timeout_s=timeout_s,
                stdin=stdin,
            )
            return await self._in_time(request, timeout_s)
        job = ShellJob(
            argv=argv,
            cwd=cwd or self._workdir,
            env=env or {},
            user=self._user(user),
            limit_s=timeout_s,
            cap_bytes=self._settings.output_cap + 1,
            stdin=stdin or b"",
        )
        kept = CappedOutput(self._settings.output_cap)
        result = await self._finish(job, JobOutput(_into(kept)), timeout_s)
        kept.truncated = max(result.sizes) > self._settings.output_cap
        code = TIMED_OUT if result.stopped else result.exit_code
        return kept.result(code, time.monotonic() - started, timed_out=result.stopped)

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[E2BProcess]:
        if self._runner.ended.done():
            raise self._runner.ended.result()
        if refusal := _refusal(argv, cwd, env):
            raise SandboxError(refusal.decode().strip(), hint="give a command to run")
        job = ShellJob(argv, cwd or self._workdir, env or {}, self._user(user), live=True)
        process = E2BProcess(self._runner, job)
        # An agent sees the same /tmp, however its sandbox was prepared.
        await self._runner.unless_lost(self._runner.tidy(but=job.user))
        try:
            await process.begin()
            yield process
        finally:
            await asyncio.shield(process.close())

    async def read(self, path: str) -> bytes:
        require_path("read", path, self.id, errors="strict")
        if self._direct:
            return await self._unless_cut(self._direct.read(path))
        return await self._runner.unless_lost(self._files().read(path))

    async def write(self, path: str, data: bytes) -> None:
        require_path("write", path, self.id, errors="strict")
        where = PurePosixPath("/") / path
        for mounted in self._mounted:
            if where.is_relative_to(mounted):
                raise file_error(
                    *("write", path, self.id, f"{mounted} is read-only"),
                    hint="write to a folder outside the mounts",
                )
        if self._direct:
            await self._unless_cut(self._direct.write(path, data))
        else:
            await self._runner.unless_lost(self._files().write(path, data))

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there.

        A public URL leads to the gateway's own port, where the session's key identifies the
        request.
        """
        if self._settings.public_url:
            return self._settings.public_url
        relay = open_relay(self, listener, on_lost=self._runner.lose)
        return await self._open.enter_async_context(relay)

    async def snapshot(self, name: str = "") -> str:
        """Keep its files at its server; return the image's reference there.

        Raises SandboxError if the server takes no snapshots.
        """
        if not (self._keeper and self.snapshot_root):
            message = f"the server of sandbox {self.id} takes no snapshots by name"
            raise SandboxError(message, hint="`swerl sandbox serve` does, for images and folders")
        await self._runner.unless_lost(self._runner.tidy())
        access = replace(self._keeper, request_timeout_s=_SNAPSHOT_S)
        asking = ask(access, "POST", self._kept_at, params={"name": name or new_name()})
        return await self._unless_cut(asking)

    def lose(self, error: SandboxLostError) -> None:
        """Make all its requests fail with this error, because its provider is gone."""
        self._is_gone = True
        self._runner.lose(error)

    async def close(self) -> None:
        """End the sandbox at its provider. Safe to call twice. Raises SandboxError if the provider
        refuses; the sandbox then runs until its lifetime is over."""
        closed = SandboxLostError(f"sandbox {self.id} is closed", hint="open a new one")
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

    async def _in_time(
        self, request: Coroutine[object, object, Exec], limit_s: float | None
    ) -> Exec:
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s + _OVERTIME_S) as timer:
                return await self._unless_cut(request)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise SandboxLostError(
                f"sandbox {self.id} is gone: a command did not end {_OVERTIME_S:g} s late",
                hint="open a new sandbox",
            ) from error

    async def _unless_cut(self, request: Coroutine[object, object, T]) -> T:
        """Return the answer. If the connection breaks, the sandbox counts as lost."""
        try:
            return await self._runner.unless_lost(request)
        except CutError as error:
            ended = self._runner.ended
            await asyncio.wait([ended], timeout=_EXPLAIN_S)
            raise (
                ended.result() if ended.done() else SandboxLostError(str(error), hint=error.hint)
            ) from error

    async def _finish(self, job: ShellJob, output: JobOutput, timeout_s: float | None) -> JobResult:
        deadline = None if timeout_s is None else timeout_s + _OVERTIME_S
        try:
            async with asyncio.timeout(deadline):
                return await self._runner.unless_lost(self._runner.finish(job, output))
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(self._runner.abandon(job))
            raise
        except TimeoutError:
            return await asyncio.shield(self._end_late(job, output))

    async def _end_late(self, job: ShellJob, output: JobOutput) -> JobResult:
        """Kill a command that its supervisor did not kill: the command may have stopped it.

        If the sandbox answers, the result is an ordinary timeout. Raises SandboxLostError.
        """
        try:
            answered = await self._runner.abandon(job)
        except UnkillableError as error:
            answered = True
            self._runner.lose(error)
        if not answered:
            message = f"sandbox {self.id} is gone: a command did not end {_OVERTIME_S:g} s late"
            lost = SandboxLostError(message, hint="open a new sandbox")
            self._runner.lose(lost)
            raise lost
        return JobResult(TIMED_OUT, stopped=True, sizes=(output.offsets[0], output.offsets[1]))

    @property
    def _kept_at(self) -> str:
        return f"/swerl/sandboxes/{self.id}/snapshot"

    def _user(self, user: str | None) -> str | None:
        if user in ("root", self._settings.user):
            return user
        if user not in (None, self._name):
            raise SandboxError(
                f"no user {user!r} in sandbox {self.id}",
                hint=f"the users are `{self._name}` and `root`",
            )
        return self._settings.user

    async def _as_root(self, argv: Sequence[str]) -> None:
        done = await self.run(argv, cwd="/", user="root", timeout_s=_SETUP_TIMEOUT_S)
        if done.exit_code:
            raise SandboxError(
                f"cannot prepare sandbox {self.id}: {done.text.strip()[-300:]}",
                hint="the template needs a user root, and space on its disk",
            )

    def _files(self) -> SandboxFiles:
        return SandboxFiles(self._runner, self._remote, self._shell, self._owner)

    async def _shell(self, argv: list[str], stdin: bytes, stdin_file: str) -> Exec:
        job = ShellJob(argv, "/", {}, "root", stdin=stdin, stdin_file=stdin_file)
        kept = CappedOutput(1 << 20)
        result = await self._runner.finish(job, JobOutput(_into(kept)))
        return kept.result(result.exit_code, 0.0)


def _into(kept: CappedOutput) -> Callable[[Chunk], Awaitable[None]]:
    async def take(chunk: Chunk) -> None:
        kept.add(chunk)

    return take


def _refusal(argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> bytes:
    """Return why these arguments cannot be a command; empty if they can."""
    if not argv:
        return b"swerl: the command is empty\n"
    if any("\0" in word for word in (*argv, cwd or "", *(env or {}), *(env or {}).values())):
        return b"swerl: a command cannot contain a null byte\n"
    return b""
