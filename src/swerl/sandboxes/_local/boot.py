"""Put this process into a new sandbox: by bubblewrap, or by the same system calls without it.

The sandbox's first process is ours either way. It makes the namespaces, with or without
bubblewrap's help, enters them, and reaps orphans until it is killed. As number 1 of its process
namespace it is deaf to every signal from inside, and whatever it starts, bubblewrap included,
dies with it. This process enters the same namespaces, but keeps its own place in the process tree:
processes inside cannot see it, and what it forks is inside.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from swerl.sandboxes._local import identity, kernel, masks, stage, title, wire
from swerl.sandboxes._local.wire import Plan

AGENT_ID = 1000
HOSTNAME = "sandbox"

_KINDS = {
    "user": kernel.NEWUSER, "net": kernel.NEWNET, "ipc": kernel.NEWIPC, "uts": kernel.NEWUTS,
    "cgroup": kernel.NEWCGROUP, "mnt": kernel.NEWNS,
}  # fmt: skip
_BOOT_TIMEOUT_MS = 30_000
_READY = b"R"


@dataclass(frozen=True, slots=True)
class Booted:
    """A sandbox that stands."""

    init: int
    """Process descriptor of its first process; when that dies, so does all in it."""
    pid: int
    owner: int
    """The user that its processes are on the host."""
    upper: int | None
    """Descriptor of the folder that collects its changes, where there is one."""


def boot(plan: Plan, device: int) -> Booted:
    """Make the sandbox and enter it; `device` holds its disk, if not -1. Raises OSError."""
    own_mounts()
    who = identity.choose(plan)
    upper = stage.build(plan, who, device)
    kernel.unshare(kernel.NEWPID)
    ready, ready_inside = os.pipe()
    alive_inside, alive = os.pipe()
    pid = kernel.patiently(os.fork)
    if pid == 0:
        os.close(alive)  # else it could not tell that the warden has died
        _run_init(plan, who.uid, ready_inside, alive_inside)
    for fd in (ready_inside, alive_inside):
        os.close(fd)
    init = os.pidfd_open(pid)
    _require_ready(ready)
    _join(pid)
    os.write(alive, _READY)
    os.close(alive)
    return Booted(init, pid, who.uid, upper)


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


def _run_init(plan: Plan, uid: int, ready: int, alive: int) -> NoReturn:
    """Be the sandbox's first process: make it, then reap orphans until killed."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _die_with_the_warden(alive)
        os.setsid()
        title.write(title.FIRST)
        settings = masks.open_settings()
        stage.mount_proc()
        masks.hide(f"{stage.ROOT}/proc")
        if plan.bwrap:
            _enter_by_bwrap(plan.bwrap, uid)
        else:
            _enter_by_unshare(uid)
        masks.bound(settings, plan.memory_mib)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
        _die_with_the_warden(alive)  # the kernel forgets it where rights change
        os.write(ready, _READY)
        if os.read(alive, 1) == _READY:
            _reap_forever()
    except OSError as error:
        os.write(ready, json.dumps(wire.failure(error)).encode())
    finally:
        os._exit(1)


def _die_with_the_warden(alive: int) -> None:
    """End this process and all in the sandbox when the warden dies, also if it just has."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    if poll.poll(0):
        os._exit(1)


def _enter_by_unshare(uid: int) -> None:
    identity.become(uid)
    own = os.geteuid(), os.getegid()
    kernel.unshare(sum(_KINDS.values()))
    map_ids((0, 0), own)
    kernel.loopback_up()
    kernel.set_hostname(HOSTNAME)
    # mounts from outside the user namespace are locked; a bound copy of the tree is not
    kernel.mount(stage.ROOT, stage.ROOT, flags=kernel.MS_BIND | kernel.MS_REC)
    os.chdir(stage.ROOT)
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")


def _enter_by_bwrap(bwrap: str, uid: int) -> None:
    """Let bubblewrap make the namespaces and enter them.

    Its program does not exist. It waits before it would start it, and by then all is made; the
    descriptors of its namespaces keep them when it has gone.
    """
    root = Path(stage.ROOT).stat()
    info, info_inside = os.pipe()
    blocked, unblock = os.pipe()
    errors = os.memfd_create("errors")
    pid = _spawn_bwrap(bwrap, uid, (info_inside, blocked, errors))
    for fd in (info_inside, blocked):
        os.close(fd)
    # where it died, its own words tell more
    with suppress(ValueError, FileNotFoundError, ProcessLookupError, BrokenPipeError):
        spaces = _namespaces(int(json.loads(_read_object(info))["child-pid"]))
        os.write(unblock, _READY)
        os.waitpid(pid, 0)
        _enter(spaces)
        identity.become(0)
        if os.path.samestat(Path("/").stat(), root):
            return
    said = os.pread(errors, 4096, 0).decode("utf-8", "replace").strip()
    raise OSError(errno.EPERM, said or "bubblewrap died while it started")


def _spawn_bwrap(bwrap: str, uid: int, fds: tuple[int, int, int]) -> int:
    info, blocked, errors = fds
    for fd in (info, blocked):
        os.set_inheritable(fd, True)
    arguments = [
        *(bwrap, "--dev-bind", stage.ROOT, "/", "--hostname", HOSTNAME),
        *("--unshare-user", "--unshare-ipc", "--unshare-net", "--unshare-uts"),
        # as uid 0 it needs one user namespace; as another it nests two, which costs 3 ms
        *("--unshare-cgroup", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"),
        *("--info-fd", str(info), "--block-fd", str(blocked), "--", "/no-program"),
    ]
    pid = kernel.patiently(os.fork)
    if pid == 0:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            for number, fd in enumerate((null, null, errors)):
                os.dup2(fd, number)
            identity.become(uid)
            os.execve(bwrap, arguments, {"PATH": "/usr/bin:/bin"})
        finally:
            os._exit(1)
    return pid


def _reap_forever() -> NoReturn:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # so that what /proc/1 shows is not the agent's
    os.closerange(0, 1 << 16)
    while True:
        signal.sigwait({signal.SIGCHLD})
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _require_ready(ready: int) -> None:
    """Wait until the sandbox's first process stands; else raise what it says is wrong."""
    said = _read(ready)
    os.close(ready)
    if said[:1] == b"{":
        failure = json.loads(said)
        raise OSError(failure["errno"], failure["failed"])
    if said != _READY:
        raise OSError(errno.EIO, "the sandbox died while it started")


def _join(pid: int) -> None:
    """Enter the namespaces of `pid`, and below its user namespace one for the agent."""
    myself = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)  # no /proc inside shows it
    _enter(_namespaces(pid))
    identity.become(0)
    kernel.unshare(kernel.NEWUSER)
    map_ids((AGENT_ID, AGENT_ID), (0, 0), myself)
    os.close(myself)


def _namespaces(pid: int) -> dict[str, int]:
    return {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS}


def _enter(spaces: dict[str, int]) -> None:
    """Enter namespaces, the user's first: only the one that owns the others may enter them."""
    for kind, fd in spaces.items():
        kernel.setns(fd, _KINDS[kind])
        os.close(fd)


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
