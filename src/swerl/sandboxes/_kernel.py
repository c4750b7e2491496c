"""Linux system calls that Python does not wrap. Each raises OSError, as functions of `os` do."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Started = TypeVar("Started")

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
NEWUSER, NEWPID, NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
_ATTR_IDMAP = 0x0010_0000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS = 38

MAX_DESCRIPTORS = 1 << 20
"""Larger than the number of every open descriptor."""

RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10

_FILE_BYTES = 1 << 14  # more than the files of a process or a cgroup have
_START_ROUNDS = 400
_STATFS_BYTES = 256
_AT_FDCWD = -100
_ALL = 0x8000  # AT_RECURSIVE
_MNT_DETACH = 2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE, _MOVE_FROM_EMPTY_PATH, _MOVE_TO_EMPTY_PATH = 1, 0x04, 0x40
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 437, 442
_MACHINE = os.uname().machine
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(_MACHINE, 41)
_SYS_SETNS = {"x86_64": 308, "aarch64": 268}.get(_MACHINE, 268)
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(_MACHINE, 91)
_CLONE_VM = 0x100
_HELD_S, _STACK_BYTES = 600, 1 << 16
_CAPABILITY_VERSION_3 = 0x2008_0522

SUPERVISOR_TITLE = "swerl-supervisor"
INIT_TITLE = "sandbox"
_ARG_START, _ARG_END = 48, 49
_STAT_FROM = 3
"""Number of the first field of /proc/self/stat after the program's name."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def retry_at_process_limit(start: Callable[[], Started]) -> Started:
    """Call `start`, which starts a process, and retry while the user's process limit is reached.

    The limit also counts dead processes that are not yet reaped, so a retry can succeed.
    """
    for _ in range(_START_ROUNDS):
        try:
            return start()
        except BlockingIOError:
            time.sleep(0.005)
    return start()


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int, password: int = 0) -> None:
    """Enter a namespace. The kernel ignores `password`; a system call filter can check it."""
    number, value = ctypes.c_long(_SYS_SETNS), ctypes.c_ulong(password)
    _check(_libc.syscall(number, ctypes.c_long(fd), ctypes.c_long(kind), value), "setns")


def user_namespace(owner: tuple[int, int], uid: int, *, proc: int | None = None) -> int:
    """Return a descriptor of a user namespace that maps `owner` (user, group) to `uid` outside.

    `proc` is a descriptor of a /proc that shows the caller's children, by default /proc. A process
    holds the namespace meanwhile. It shares this one's memory, which costs a tenth of a fork, and
    does nothing but sleep, so it ends by itself if this one is killed.
    """
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = ctypes.c_void_p(ctypes.addressof(stack) + _STACK_BYTES)
    flags = NEWUSER | _CLONE_VM | signal.SIGCHLD
    pid = retry_at_process_limit(
        lambda: _check(_libc.clone(_libc.sleep, top, flags, ctypes.c_void_p(_HELD_S)), "clone")
    )
    try:
        folder = os.open(f"/proc/{pid}" if proc is None else str(pid), os.O_PATH, dir_fd=proc)
        try:
            for name, inside in zip(("uid_map", "gid_map"), owner, strict=True):
                write(name, f"{inside} {uid} 1", folder=folder)
            return os.open("ns/user", os.O_RDONLY, dir_fd=folder)
        finally:
            os.close(folder)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def write(path: str, text: str, *, mode: int = 0o644, folder: int | None = None) -> None:
    """Write a text to a new file, or to one of the kernel's, which takes it in one call."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, mode, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read(path: str, *, folder: int | None = None) -> bytes:
    """Return a small file of the kernel."""
    fd = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(fd, _FILE_BYTES)
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, data: str = "") -> None:
    """Mount a file system, or bind a folder if `flags` has MS_BIND."""
    source_b, target_b, kind_b, data_b = map(os.fsencode, (source, target, kind, data))
    result = _libc.mount(source_b, target_b, kind_b, ctypes.c_ulong(flags), data_b)
    if result < 0:
        _check(result, f"mount {kind or source} on {target}")


def restrict(target: str | int, attributes: int, space: int = 0, *, extent: int = _ALL) -> None:
    """Add mount attributes (ATTR_…) to a mount, or a descriptor of one, and to those below it."""
    request = struct.pack("QQQQ", attributes, 0, 0, space)
    folder, path = (target, b"") if isinstance(target, int) else (_AT_FDCWD, os.fsencode(target))
    _call(_SYS_MOUNT_SETATTR, folder, path, _AT_EMPTY_PATH | extent, request, len(request))


def detached(source: str, extent: int = _ALL) -> int:
    """Return a descriptor of a detached mount of `source`, by default with the mounts below it."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | extent
    return _call(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags)


def view(source: str, user_namespace: int, *, recursive: bool) -> int:
    """Return a detached mount of `source`, its owners mapped by the user namespace (idmapped)."""
    extent = _ALL if recursive else 0
    fd = detached(source, extent)
    try:
        restrict(fd, _ATTR_IDMAP, user_namespace, extent=extent)
    except OSError:
        os.close(fd)
        raise
    return fd


def attach(mount: int, place: int) -> None:
    """Attach a detached mount at a place; both are descriptors."""
    flags = _MOVE_FROM_EMPTY_PATH | _MOVE_TO_EMPTY_PATH
    _call(_SYS_MOVE_MOUNT, mount, b"", place, b"", flags)


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Create files as this user and group."""
    own = os.geteuid()
    if uid == own:
        yield
        return
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(own)
        _libc.setfsgid(os.getegid())


def detach(target: str) -> None:
    """Unmount a tree of mounts; it vanishes when its last user leaves."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace; the old one appears at `put_old`."""
    _call(_SYS_PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old))


def prctl(option: int, value: int, extra: bytes | int = 0) -> None:
    third = extra if isinstance(extra, bytes) else ctypes.c_ulong(extra)
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), third, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Give up every capability for good: bounding set, permitted, effective, inheritable."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last capability that this kernel knows, or already dropped
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _call(_SYS_CAPSET, header, bytes(24))


def openat2(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` as if the directory `root` were "/"; no link leads out of it."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    for _ in range(32):
        fd = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how))
        if fd >= 0:
            return int(fd)
        if ctypes.get_errno() != 11:  # EAGAIN: a rename raced with "..", so try again
            break
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


def file_system(fd: int) -> int:
    """Return the number of the file system of an open file (`f_type` of statfs)."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    _check(_libc.fstatfs(ctypes.c_int(fd), buffer), "fstatfs")
    return int.from_bytes(buffer.raw[:8], "little")


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def loopback_up() -> None:
    """Bring `lo` up in this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _call(number: int, *arguments: int | bytes) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


@functools.cache  # a fork keeps its command line in the same place
def command_line_place() -> tuple[int, int]:
    """Return where in memory this process's command line begins and ends."""
    # The program's name may contain spaces and brackets.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[_ARG_START - _STAT_FROM]), int(fields[_ARG_END - _STAT_FROM])


def set_command_line(*words: str) -> None:
    """Replace this process's command line, as `ps` shows it; longer text is cut to its length."""
    start, end = command_line_place()
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def command_line(pid: int) -> list[str]:
    """Return a process's command line; empty if it is gone or a kernel thread."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(text.rstrip(b"\0")).split("\0")
