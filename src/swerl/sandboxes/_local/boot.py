"""Put this process into a new sandbox: by bubblewrap, or by the same system calls without it.

Either way the process ends up in the sandbox's namespaces, except that it keeps its own place in
the process tree: processes inside cannot see it, and what it forks is inside.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from swerl.sandboxes._local import kernel, stage
from swerl.sandboxes._local.wire import Plan

AGENT_ID = 1000
HOSTNAME = "sandbox"

_KINDS = {
    "user": kernel.NEWUSER, "pid": kernel.NEWPID, "net": kernel.NEWNET, "ipc": kernel.NEWIPC,
    "uts": kernel.NEWUTS, "cgroup": kernel.NEWCGROUP, "mnt": kernel.NEWNS,
}  # fmt: skip
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "driver")
_BOOT_TIMEOUT_MS = 30_000
_READY = b"R"


@dataclass(frozen=True, slots=True)
class Booted:
    """A sandbox that stands."""

    init: int
    """Process descriptor of its first process; when that dies, so does all in it."""
    pid: int
    upper: int | None
    """Descriptor of the folder that collects its changes, where there is one."""


def boot(plan: Plan) -> Booted:
    """Make the sandbox and enter it. Raises OSError."""
    own_mounts()
    upper = stage.build(plan)
    pid = _enter_bwrap(plan.bwrap) if plan.bwrap else _enter_unshare()
    return Booted(os.pidfd_open(pid), pid, upper)


def own_mounts() -> None:
    """Enter a mount namespace in which this process may mount. Raises OSError."""
    own = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEWNS)
    except PermissionError:
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        map_ids(own, own)


def map_ids(inside: tuple[int, int], outside: tuple[int, int], myself: int | None = None) -> None:
    """Name this process's (user, group) in the user namespace that it has just made.

    `myself` is a descriptor of its /proc folder, where it does not see itself.
    """
    fd = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY) if myself is None else os.dup(myself)
    texts = {
        "setgroups": "deny",
        "uid_map": f"{inside[0]} {outside[0]} 1",
        "gid_map": f"{inside[1]} {outside[1]} 1",
    }
    for name, text in texts.items():
        file = os.open(name, os.O_WRONLY, dir_fd=fd)
        os.write(file, text.encode())
        os.close(file)
    os.close(fd)


# Without bubblewrap


def _enter_unshare() -> int:
    own = os.geteuid(), os.getegid()
    kernel.unshare(sum(_KINDS.values()))
    map_ids((AGENT_ID, AGENT_ID), own)
    kernel.loopback_up()
    kernel.set_hostname(HOSTNAME)
    old_root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    # mounts from outside the user namespace are locked; a bound copy of the tree is not
    kernel.mount(stage.ROOT, stage.ROOT, flags=kernel.MS_BIND | kernel.MS_REC)
    os.chdir(stage.ROOT)
    kernel.pivot_root(".", ".")
    ready, ready_inside = os.pipe()
    pid = kernel.patiently(os.fork)
    if pid == 0:
        os.close(ready)  # else the write below could not tell that the warden has died
        _run_init(old_root, ready_inside)
    os.close(ready_inside)
    os.close(old_root)
    os.chdir("/")
    _require_ready(ready)
    return pid


def _run_init(old_root: int, ready: int) -> NoReturn:
    """Be the sandbox's first process: finish its mounts, then reap orphans until killed."""
    try:
        os.setsid()
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("proc", "/proc", "proc", flags=flags)
        _protect_proc()
        os.fchdir(old_root)
        kernel.detach(".")
        os.chdir("/")
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        os.write(ready, _READY)
        os.closerange(3, 1 << 16)
        while True:
            signal.sigwait({signal.SIGCHLD})
            _reap()
    except OSError as error:
        os.write(ready, str(error).encode())
    finally:
        os._exit(1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _require_ready(ready: int) -> None:
    """Wait until the sandbox's first process stands; else raise what it says is wrong."""
    said = _read(ready)
    os.close(ready)
    if said[:1] != _READY:
        raise OSError(5, said.decode("utf-8", "replace") or "the sandbox died while it started")


# With bubblewrap


def _enter_bwrap(bwrap: str) -> int:
    info, info_inside = os.pipe()
    ready, stdout = os.pipe()
    stdin, keep_alive = os.pipe()
    errors = os.memfd_create("errors")
    _spawn_bwrap(bwrap, info_inside, (stdin, stdout, errors))
    for fd in (info_inside, stdout, stdin):
        os.close(fd)
    # bubblewrap names the process before that has its own root; `cat` answers after
    os.write(keep_alive, _READY)
    if _read(ready) != _READY:
        said = os.pread(errors, 4096, 0).decode("utf-8", "replace").strip()
        raise OSError(1, said or "bubblewrap died while it started")
    pid = int(json.loads(_read_object(info))["child-pid"])
    for fd in (info, ready, errors):
        os.close(fd)
    _join(pid)
    return pid


def _spawn_bwrap(bwrap: str, info: int, streams: Sequence[int]) -> None:
    """Start bubblewrap around `cat`, which ends when the warden's end of its input closes."""
    os.set_inheritable(info, True)
    arguments = [
        *(bwrap, "--bind", stage.ROOT, "/", "--proc", "/proc", "--dev", "/dev"),
        *("--unshare-all", "--hostname", HOSTNAME, "--new-session", "--die-with-parent"),
        # as uid 0 it needs one user namespace; as another it nests two, which costs 3 ms
        *("--uid", "0", "--gid", "0", "--cap-drop", "ALL"),
        *("--chdir", "/", "--info-fd", str(info), "--", "/usr/bin/cat"),
    ]
    moves = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)]
    path = {"PATH": "/usr/bin:/bin"}
    kernel.patiently(lambda: os.posix_spawn(bwrap, arguments, path, file_actions=moves))


def _join(pid: int) -> None:
    """Enter the namespaces of `pid`, and below its user namespace one for the agent.

    Only the user namespace that owns the others may enter them.
    """
    myself = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)  # no /proc inside shows it
    kinds = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS}
    kernel.setns(kinds["user"], kernel.NEWUSER)
    for kind, fd in kinds.items():
        if kind != "user":
            kernel.setns(fd, _KINDS[kind])
        os.close(fd)
    _protect_proc()
    kernel.unshare(kernel.NEWUSER)
    map_ids((AGENT_ID, AGENT_ID), (0, 0), myself)
    os.close(myself)


def _protect_proc() -> None:
    """Make the kernel's settings read-only: the host's root could write them without capability."""
    for name in _KERNEL_SETTINGS:
        path = f"/proc/{name}"
        with suppress(FileNotFoundError):
            kernel.mount(path, path, flags=kernel.MS_BIND | kernel.MS_REC)
            kernel.restrict(path, kernel.ATTR_RDONLY)


def _read(fd: int) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return os.read(fd, 4096) if poll.poll(_BOOT_TIMEOUT_MS) else b""


def _read_object(fd: int) -> bytes:
    """Read a JSON object that arrives in pieces."""
    said = b""
    while b"}" not in said and (piece := _read(fd)):
        said += piece
    return said
