"""The `local` sandbox: namespaces on this machine, no daemon, no container engine, no network.

One spawner process per backend forks one supervisor per sandbox. The supervisor makes the sandbox
by system calls, and starts its commands. Mounts and files are in the sandbox's own namespaces and
disappear with its last process, also after `kill -9`.

A sandbox is found by its supervisor's command line. If the supervisor and the spawner were both
killed, the sandbox's cgroups and scratch folder remain; they have its name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.liveness import start_time_s
from swerl.core.sandbox import Limits, LiveSandbox, Mount, folder_owner_lives, new_name
from swerl.images.local import LocalImage, identify, snapshot_id, use
from swerl.images.store import default_store
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._local import limits as cgroups
from swerl.sandboxes._local import wire
from swerl.sandboxes._local.process import Link
from swerl.sandboxes._local.sandbox import LocalSandbox
from swerl.sandboxes._local.wire import SandboxPlan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SOURCE = str(Path(__file__).resolve().parents[2])
_SPAWNER = (
    *("-I", "-S", "-X", "utf8", "-c"),
    "import sys; sys.path.append(sys.argv[1]); "
    "from swerl.sandboxes._local import spawner; spawner.main(int(sys.argv[2]))",
)
_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EUSERS, errno.ENOSYS}
_NO_NAMESPACES = (
    "`sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0` on Linux 5.12 or newer; a container needs "
    "`docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined`; or use --set sandbox.type=docker or e2b"
)
_REMOVE_ROUNDS, _REMOVE_PAUSE_S = 400, 0.005
_DEATH_S = 5.0


class Options(BaseModel):
    """Settings of the `local` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scratch: Path | None = None
    """Folder on disk for files that sandboxes write. Default: memory, which is fastest and leaves
    nothing behind; set a folder if memory is too small. `disk_mib` then bounds each file and not
    their sum, so use a file system of its own."""


def build(options: Options) -> LocalBackend:
    return LocalBackend(options)


def sweep(scratch: Path) -> int:
    """Remove the folders of dead controllers from `scratch`; return their number."""
    dead = [path for path in scratch.glob("swerl-*-*") if not folder_owner_lives(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return len(dead)


class LocalBackend:
    """Makes sandboxes on this machine."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._spawner: socket.socket | None = None
        self._groups: Mapping[str, Path] = {}
        """Cgroups above those of the sandboxes."""
        self.spawner_pid = 0
        """Process that forks the supervisors; 0 before the first sandbox."""

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[LocalSandbox]:
        name = name or new_name()
        _require_name(name)
        if sys.platform != "linux":
            raise SandboxUnavailableError("local sandboxes need Linux", hint=_NO_NAMESPACES)
        return self._open(name, image, limits, workdir, mounts)

    async def live(self) -> Sequence[LiveSandbox]:
        """Return this user's sandboxes on this machine, of every controller; as root, all users'.

        The list includes dead sandboxes with leftovers (cgroups, a scratch folder), which `remove`
        deletes.
        """
        return await asyncio.to_thread(_list_sandboxes, self._options.scratch)

    async def remove(self, name: str) -> None:
        _require_name(name)
        if not await asyncio.to_thread(_remove_sandbox, name, self._options.scratch):
            raise SandboxError(
                f"sandbox {name} cannot be removed",
                hint="it may belong to another user; run this command as root",
            )

    def price(self, limits: Limits) -> float:
        return 0.0

    async def identify(self, image: str) -> str:
        return await asyncio.to_thread(identify, image)

    async def find_snapshot(self, name: str) -> str:
        layer_id = snapshot_id(name)
        return f"snapshot:{layer_id}" if default_store().has_layer(layer_id) else ""

    async def drop_snapshot(self, name: str) -> None:
        await asyncio.to_thread(default_store().drop_layer, snapshot_id(name))

    @asynccontextmanager
    async def _open(
        self, name: str, image: str, limits: Limits, workdir: str, mounts: Sequence[Mount]
    ) -> AsyncIterator[LocalSandbox]:
        with use(image) as found:
            plan = self._plan(name, found, limits, workdir, mounts)
            plan = dataclasses.replace(plan, image=image)
            channel, verdict = self._spawn(plan)
            spawner, spawner_pid = self._spawner, self.spawner_pid
            link = Link(
                channel,
                name,
                verdict=verdict,
                lifetime_s=plan.lifetime_s,
                remove=partial(_remove_sandbox, name, self._options.scratch),
            )
            sandbox = LocalSandbox(link, plan, found.env, self._groups)
            try:
                try:
                    await _boot(sandbox)
                except SandboxLostError as error:
                    if not link.is_given_up or any(one.name == name for _, one in _supervisors()):
                        raise
                    # The next sandbox gets another spawner; this one's sandboxes live on.
                    if self._spawner is spawner:
                        self._spawner = None
                    message = f"the spawner (process {spawner_pid}) does not answer"
                    hint = "is it stopped? `kill -CONT` continues it; the next sandbox gets another"
                    raise SandboxError(
                        f"sandbox {name} cannot start: {message}", hint=hint
                    ) from error
                yield sandbox
            finally:
                await asyncio.shield(sandbox.close())

    def _plan(
        self, name: str, image: LocalImage, limits: Limits, workdir: str, mounts: Sequence[Mount]
    ) -> SandboxPlan:
        scratch = self._options.scratch
        return SandboxPlan(
            id=name,
            workdir=workdir,
            layers=[str(path) for path in image.layers],
            is_whole=image.is_whole,
            content=str(image.content) if image.content else "",
            over=[str(path) for path in image.over],
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

    def _spawn(self, plan: SandboxPlan) -> tuple[socket.socket, int]:
        """Have the spawner fork a supervisor.

        Returns the controller's ends of its socket and of the pipe for whose fault its end is.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        verdict, written = os.pipe()
        try:
            for _ in range(2):
                spawner = self._spawner or self._start_spawner()
                try:
                    wire.send(spawner, plan, [theirs.fileno(), written])
                except ConnectionError:
                    self._spawner = None  # it was killed, and its sandboxes with it
                else:
                    return ours, verdict
        finally:
            theirs.close()
            os.close(written)
        ours.close()
        os.close(verdict)
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
        self._groups = cgroups.find()
        self._spawner, self.spawner_pid = ours, process.pid
        return ours


def _require_name(name: str) -> None:
    """Refuse a name that could lead to a folder of something else."""
    if not _NAME.fullmatch(name):
        raise SandboxError(
            f"{name!r} cannot name a sandbox",
            hint="use letters, digits, dots, dashes and underscores",
        )


async def _boot(sandbox: LocalSandbox) -> None:
    try:
        await sandbox.boot()
    except SandboxError:
        raise
    except OSError as error:
        message = f"sandbox {sandbox.id} cannot start: {error.strerror}"
        if error.errno in _FORBIDDEN or str(error.strerror).startswith("unshare"):
            # unshare's "No space left on device" would read as a full disk.
            message = f"user namespaces do not work on this machine: {error.strerror}"
            raise SandboxUnavailableError(message, hint=_NO_NAMESPACES) from error
        full = error.errno == errno.ENOSPC
        hint = "free some space" if full else "run `swerl doctor` to see what this machine lacks"
        raise SandboxError(message, hint=hint) from error


def _stop_spawner(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.send_signal(signal.SIGCONT)  # a stopped one would not notice
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def _list_sandboxes(scratch: Path | None) -> list[LiveSandbox]:
    """Return the sandboxes on this machine that this user may see, running ones first."""
    found = {sandbox.name: sandbox for _, sandbox in _supervisors()}
    for path in _leftover_folders(cgroups.find(), scratch):
        with suppress(OSError):  # its spawner has just removed it
            left = LiveSandbox(path.name, path.name, started_unix_s=path.stat().st_mtime)
            found.setdefault(path.name, left)
    return list(found.values())


def _remove_sandbox(name: str, scratch: Path | None) -> bool:
    """Kill a sandbox and remove its leftovers; return whether all are gone."""
    for pid, sandbox in _supervisors():
        if sandbox.name == name:
            _kill_supervisor(pid, name)
    groups = cgroups.find()
    for _ in range(_REMOVE_ROUNDS):
        if cgroups.remove(groups, name):
            break
        time.sleep(_REMOVE_PAUSE_S)
    if scratch:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return not any(path.name == name for path in _leftover_folders(groups, scratch))


def _supervisors() -> Iterator[tuple[int, LiveSandbox]]:
    """Yield the pid of each supervisor, and its sandbox."""
    for number in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  paths cost a third more
        pid = int(number)
        words = kernel.command_line(pid)
        if len(words) < 2 or words[0] != kernel.SUPERVISOR_TITLE:
            continue
        with suppress(OSError):  # it ended meanwhile
            if _is_ours(pid):
                yield pid, LiveSandbox(words[1], words[1], started_unix_s=start_time_s(pid))


def _is_ours(pid: int) -> bool:
    """Return whether a process belongs to this user, or this user is root, and it is no sandbox's.

    A process inside a sandbox can copy the command line, but it has a second pid, in its own
    namespace.
    """
    theirs, own = _status(pid), _status(os.getpid())
    same_namespace = len(theirs.get("NSpid", "")) == len(own.get("NSpid", ""))
    return same_namespace and own["Uid"][1] in ("0", theirs["Uid"][1])


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: values.split() for key, _, values in (line.partition(":") for line in lines)}


def _leftover_folders(groups: Mapping[str, Path], scratch: Path | None) -> list[Path]:
    return [*cgroups.leftovers(groups), *(scratch.glob("swerl-*-*") if scratch else ())]


def _kill_supervisor(pid: int, name: str) -> None:
    """Kill a supervisor, and wait until it and its children are dead; the rest dies with them."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    fds = []
    try:
        for each in (pid, *map(int, children.read_text().split() if children.exists() else ())):
            fds.append(os.pidfd_open(each))
        if kernel.command_line(pid)[1:2] == [name]:  # no other process reuses its pid
            signal.pidfd_send_signal(fds[0], signal.SIGKILL)
            for fd in fds:
                select.select([fd], [], [], _DEATH_S)
    except OSError:
        pass  # it has just ended
    finally:
        for fd in fds:
            os.close(fd)
