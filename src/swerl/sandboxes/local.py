"""The `local` sandbox: namespaces on this machine, no daemon, no container engine, no network.

One spawner process per backend forks a warden per sandbox. The warden makes the sandbox, by
bubblewrap or by the same system calls without it, and starts its commands. Mounts and files live
in the sandbox's own namespaces and vanish with its last process, also after `kill -9`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import re
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, new_name
from swerl.sandboxes._local import census, wire
from swerl.sandboxes._local.base import LocalImage
from swerl.sandboxes._local.image import use
from swerl.sandboxes._local.link import Link
from swerl.sandboxes._local.sandbox import LocalSandbox
from swerl.sandboxes._local.wire import Plan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SOURCE = str(Path(__file__).resolve().parents[2])
_SPAWNER = (
    *("-I", "-S", "-X", "utf8", "-c"),
    "import sys; sys.path.append(sys.argv[1]); "
    "from swerl.sandboxes._local import spawner; spawner.main(int(sys.argv[2]))",
)
_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EUSERS, errno.ENOSYS}
_NO_NAMESPACES = (
    "it takes Linux 5.12, and root or user namespaces (`sysctl user.max_user_namespaces=10000 "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0`)"
)


class Options(BaseModel):
    """Settings of the `local` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    isolator: Literal["auto", "bwrap", "unshare"] = "auto"
    """Who makes the namespaces; `auto` takes bubblewrap where it is installed."""
    scratch: Path | None = None
    """Folder on disk for what sandboxes write. By default they write to memory, which is fastest
    and leaves nothing behind; name a folder where that does not fit. Root's sandboxes then have
    a file system of their own of `disk_mib`; others end when they have written more."""
    pull: Literal["missing", "never"] = "missing"
    """Whether an image that the store lacks is pulled when a sandbox first wants it; by default a
    run needs no step before it. `never` is for machines without a way to a registry."""
    output_cap_mib: float = Field(default=8.0, gt=0)
    """Most MiB kept of each of a command's two output streams; test logs are below 2."""


def build(options: Options) -> LocalBackend:
    """Return the backend. Raises SandboxUnavailableError where a named isolator is missing."""
    return LocalBackend(options)


def sweep(scratch: Path) -> int:
    """Remove the folders that dead controllers left in `scratch`; return how many."""
    dead = [path for path in scratch.glob("swerl-*-*") if not census.owner_lives(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return len(dead)


class LocalBackend:
    """Makes sandboxes on this machine."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._bwrap = _find_bwrap(options.isolator)
        self._spawner: socket.socket | None = None
        self.spawner_pid = 0
        """Process that forks the wardens; 0 before the first sandbox."""

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[LocalSandbox]:
        """Create a sandbox of `image`; leaving the context removes it whatever happened."""
        name = name or new_name()
        _require_name(name)
        return self._open(name, image, limits, workdir, mounts)

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the sandboxes on this machine, whoever opened them; as root, every user's.

        What a dead one left (cgroups, a scratch folder) counts, too: `remove` clears it away.
        """
        seen = await asyncio.to_thread(census.take, self._options.scratch)
        return [LiveSandbox(one.name, one.name, one.image, one.started_unix_s) for one in seen]

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name and all that is left of it; nothing where none is."""
        _require_name(name)
        if not await asyncio.to_thread(census.remove, name, self._options.scratch):
            raise SandboxError(
                f"sandbox {name} cannot be removed", hint="it may be another user's; ask as root"
            )

    def price(self, limits: Limits) -> float:
        """Return 0: this machine is paid for."""
        return 0.0

    @asynccontextmanager
    async def _open(
        self, name: str, image: str, limits: Limits, workdir: str, mounts: Sequence[Mount]
    ) -> AsyncIterator[LocalSandbox]:
        with use(image) as found:
            plan = self._plan(name, found, limits, workdir, mounts)
            plan = dataclasses.replace(plan, image=image)
            link = Link(self._spawn(plan), plan.id)
            sandbox = LocalSandbox(link, plan, found.env, int(self._options.output_cap_mib * 2**20))
            try:
                await _boot(sandbox)
                yield sandbox
            finally:
                await asyncio.shield(sandbox.close())

    def _plan(
        self,
        name: str,
        image: LocalImage,
        limits: Limits,
        workdir: str,
        mounts: Sequence[Mount],
    ) -> Plan:
        scratch = self._options.scratch
        return Plan(
            id=name,
            workdir=workdir,
            bwrap=self._bwrap,
            layers=[str(path) for path in image.layers],
            is_whole=image.is_whole,
            content=str(image.content) if image.content else "",
            binds=[(str(mount.source), mount.target) for mount in image.binds],
            mounts=[(str(mount.source), mount.target) for mount in mounts],
            links=list(image.links.items()),
            files=list(image.files.items()),
            scratch=str(scratch.absolute() / name) if scratch else "",
            memory_mib=limits.memory_mib,
            num_processes=limits.num_processes,
            num_cpus=limits.num_cpus,
            disk_mib=limits.disk_mib,
            lifetime_s=limits.lifetime_s,
        )

    def _spawn(self, plan: Plan) -> socket.socket:
        """Ask the spawner for a warden; return this side's end of the warden's socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for _ in range(2):
                spawner = self._spawner or self._start_spawner()
                try:
                    wire.send(spawner, plan, [theirs.fileno()])
                except ConnectionError:
                    self._spawner = None  # somebody killed it; its sandboxes are gone too
                else:
                    return ours
        ours.close()
        raise SandboxError(
            "the sandbox spawner dies as it starts",
            hint="look for `killed process` in the kernel's log",
        )

    def _start_spawner(self) -> socket.socket:
        if scratch := self._options.scratch:
            scratch.mkdir(parents=True, exist_ok=True)
            sweep(scratch)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [*_SPAWNER, _SOURCE, str(theirs.fileno())]
            process = subprocess.Popen(
                [sys.executable, *argv],
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        weakref.finalize(self, _stop_spawner, ours, process)
        self._spawner, self.spawner_pid = ours, process.pid
        return ours


def _require_name(name: str) -> None:
    """Refuse a name that could lead to another folder than the sandbox's own."""
    if not _NAME.fullmatch(name):
        raise SandboxError(
            f"{name!r} cannot name a sandbox",
            hint="use letters, digits, dots, dashes and underscores",
        )


def _find_bwrap(isolator: str) -> str:
    found = "" if isolator == "unshare" else shutil.which("bwrap") or ""
    if isolator == "bwrap" and not found:
        message = "bubblewrap is not installed, and isolator is `bwrap`"
        hint = 'install the package `bubblewrap`, or set isolator = "unshare"'
        raise SandboxUnavailableError(message, hint=hint)
    return found


async def _boot(sandbox: LocalSandbox) -> None:
    try:
        await sandbox.boot()
    except SandboxError:
        raise
    except OSError as error:
        message = f"sandbox {sandbox.id} cannot start: {error.strerror}"
        if error.errno in _FORBIDDEN or str(error.strerror).startswith("unshare"):
            raise SandboxUnavailableError(message, hint=_NO_NAMESPACES) from error
        full = error.errno == errno.ENOSPC
        hint = "free some space" if full else "`swerl doctor` tells what this machine lacks"
        raise SandboxError(message, hint=hint) from error


def _stop_spawner(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the spawner and with it every sandbox that it still holds."""
    channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
