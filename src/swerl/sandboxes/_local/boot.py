"""Create a sandbox's namespaces and its init process, and join them.

The init process makes the namespaces, enters them, and reaps orphans until it is killed. As pid 1
of its pid namespace it ignores all signals from inside, and everything that it starts dies with it.
The calling process then joins the same namespaces except the pid namespace: processes inside cannot
see it, but its children are inside.

Before a command can start, the init process has closed every descriptor, and neither process is
dumpable: the kernel then refuses their memory and descriptors, and those of their children until
they call exec, to everything inside.

Root's sandboxes have a host user, so /proc must not show them files that root may read without a
capability. Some resources are counted by the kernel per user; each sandbox has its own limits for
them, so that no sandbox can exhaust the host user's limits.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._local import stage, wire
from swerl.sandboxes._local.wire import SandboxPlan

AGENT_ID = 1000

_KINDS = {
    "user": kernel.NEWUSER, "net": kernel.NEWNET, "ipc": kernel.NEWIPC, "uts": kernel.NEWUTS,
    "cgroup": kernel.NEWCGROUP, "mnt": kernel.NEWNS,
}  # fmt: skip
_BOOT_TIMEOUT_MS = 30_000
_READY = b"R"
_SIGNALS = signal.valid_signals()

_COUNTED = {
    "max_inotify_instances": 16, "max_inotify_watches": 16_384,
    "max_fanotify_groups": 16, "max_fanotify_marks": 4_096,
}  # fmt: skip
"""Largest number of each for one sandbox. A host user has 128 instances and groups."""

_SHARED_PART = 16
_PAGE_BYTES = 4096
_SYSTEM_V = {"shm_rmid_forced": "1", "msgmni": "64", "sem": "250 3200 100 128"}
"""Limits of System V memory, queues and semaphores, which outlive their creators. Without limits a
sandbox could fill its memory with them, and no command could start in it."""


@dataclass(frozen=True, slots=True)
class Booted:
    """A sandbox that has started."""

    init: int
    """Process descriptor of its init process; everything inside dies with it."""
    pid: int
    owner: int
    """Host user id of its processes."""
    upper: int | None
    """Descriptor of the overlay folder with its changes; None without an overlay."""
    root_space: int
    """Descriptor of the user namespace in which the agent's user is number 0."""


def boot(plan: SandboxPlan) -> Booted:
    """Make the sandbox and enter it. Raises OSError."""
    enter_mount_namespace()
    user = stage.choose_user(plan)
    upper = stage.build(plan, user)
    # Only children enter the new pid namespace, so this process stays invisible inside.
    kernel.unshare(kernel.NEWPID)
    ready, ready_inside = os.pipe()
    alive_inside, alive = os.pipe()
    pid = kernel.retry_at_process_limit(os.fork)
    if pid == 0:
        os.close(alive)  # the last open end: its closing shows that the supervisor has died
        _run_init(plan, user.uid, ready_inside, alive_inside)
    for fd in (ready_inside, alive_inside):
        os.close(fd)
    # Unlike a pid, the descriptor can never refer to a later process.
    init = os.pidfd_open(pid)
    _require_ready(ready)
    root_space = _join(pid)
    # The init process exits unless it reads this byte, so a failed join leaves nothing.
    os.write(alive, _READY)
    os.close(alive)
    _require_closed(ready)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    return Booted(init, pid, user.uid, upper, root_space)


def enter_mount_namespace() -> None:
    """Enter a mount namespace in which this process may mount. Raises OSError."""
    own = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEWNS)
    except PermissionError:
        # An ordinary user may mount only in a user namespace of its own.
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        map_ids(own, own)


def map_ids(inside: tuple[int, int], outside: tuple[int, int], myself: int | None = None) -> None:
    """Map this process's (user, group) in the user namespace that it has just made.

    `myself` is a descriptor of its /proc folder, needed if the mounted /proc does not show it.
    """
    fd = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY) if myself is None else os.dup(myself)
    # The kernel requires `deny` before an unprivileged process may map its group.
    texts = {
        "setgroups": "deny",
        "uid_map": f"{inside[0]} {outside[0]} 1",
        "gid_map": f"{inside[1]} {outside[1]} 1",
    }
    for name, text in texts.items():
        kernel.write(name, text, folder=fd)
    os.close(fd)


def _run_init(plan: SandboxPlan, uid: int, ready: int, alive: int) -> NoReturn:
    """Run as the sandbox's init process: make the namespaces, then reap orphans until killed."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        _die_with_supervisor(alive)
        os.setsid()
        kernel.set_command_line(kernel.INIT_TITLE)
        settings = os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY)  # while they are writable
        stage.mount_proc(uid)
        _enter_namespaces(uid)
        _limit_kernel_objects(settings, plan.memory_mib)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
        _die_with_supervisor(alive)  # a change of privileges resets it
        os.write(ready, _READY)
        if os.read(alive, 1) == _READY:
            _reap_forever()
    except OSError as error:
        os.write(ready, json.dumps(wire.failure(error)).encode())
    finally:
        os._exit(1)


def _die_with_supervisor(alive: int) -> None:
    """Have the kernel kill this process when the supervisor dies; exit if it is dead already."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    if poll.poll(0):
        os._exit(1)


def _enter_namespaces(uid: int) -> None:
    stage.become(uid)
    own = os.geteuid(), os.getegid()
    kernel.unshare(sum(_KINDS.values()))
    map_ids((0, 0), own)
    kernel.loopback_up()
    kernel.set_hostname(stage.HOSTNAME)
    # mounts from outside the user namespace are locked; a bind mount of the tree is not
    kernel.mount(stage.ROOT, stage.ROOT, flags=kernel.MS_BIND | kernel.MS_REC)
    os.chdir(stage.ROOT)
    # The old root now lies over the new one, and the next call removes it.
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")


def _limit_kernel_objects(settings: int, memory_mib: int) -> None:
    """Limit what this process's namespaces may take of the kernel; `settings` is /proc/sys.

    If the settings are read-only, or only the host's root may write them, the kernel's own limits
    stay in force.
    """
    shared = {"shmall": f"{(memory_mib << 20) // _SHARED_PART // _PAGE_BYTES}", **_SYSTEM_V}
    wanted = {f"user/{name}": str(most) for name, most in _COUNTED.items()}
    wanted |= {f"kernel/{name}": value for name, value in shared.items()}
    for path, value in wanted.items():
        with suppress(OSError):
            kernel.write(path, value, folder=settings)
    os.close(settings)


def _reap_forever() -> NoReturn:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # so that the agent does not own /proc/1
    # The init process is visible inside and must hold no descriptor of the host. That the pipe to
    # the supervisor closes shows that it holds none.
    os.closerange(0, kernel.MAX_DESCRIPTORS)
    while True:
        signal.sigwait({signal.SIGCHLD})
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _require_ready(ready: int) -> None:
    """Wait until the init process is ready. Raises the OSError that it reports."""
    detail = _read(ready)
    if detail[:1] == b"{":
        failure = json.loads(detail)
        raise OSError(failure["errno"], failure["failed"])
    if detail != _READY:
        raise OSError(errno.EIO, "the sandbox died while it started")


def _require_closed(ready: int) -> None:
    """Wait until the init process has closed its end of the pipe. Raises OSError."""
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    if not poll.poll(_BOOT_TIMEOUT_MS) or os.read(ready, 1):
        raise OSError(errno.EIO, "the sandbox's init process does not answer")
    os.close(ready)


def _join(pid: int) -> int:
    """Enter the namespaces of `pid`, and a nested user namespace for the agent.

    Returns a descriptor of another one below that, for commands as root.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # the /proc inside does not show it
    myself = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    _enter(_namespaces(pid))
    stage.become(0)
    kernel.unshare(kernel.NEWUSER)
    map_ids((AGENT_ID, AGENT_ID), (0, 0), myself)
    root_space = kernel.user_namespace((0, 0), AGENT_ID, proc=proc)
    for fd in (proc, myself):
        os.close(fd)
    return root_space


def _namespaces(pid: int) -> dict[str, int]:
    return {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS}


def _enter(spaces: dict[str, int]) -> None:
    """Enter namespaces, the user namespace first: it owns the others and permits entering them."""
    for kind, fd in spaces.items():
        kernel.setns(fd, _KINDS[kind])
        os.close(fd)


def _read(fd: int) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return os.read(fd, 4096) if poll.poll(_BOOT_TIMEOUT_MS) else b""
