"""System calls reserved for administrators, with arguments that change nothing."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
import time

from tests.attacks.inside.calls import attempt, name_of, raw

_NEW = {
    "user": 0x1000_0000, "mount": 0x0002_0000, "network": 0x4000_0000, "process": 0x2000_0000,
    "ipc": 0x0800_0000, "hostname": 0x0400_0000, "control group": 0x0200_0000,
}  # fmt: skip
_MS_BIND, _MNT_DETACH, _CLONE_TREE, _ADJ_TICK = 4096, 2, 1, 0x4000
_DENIED = ("EPERM", "EACCES", "ENOSYS")
"""Errors that mean a refused call. Any other error is about the argument of a permitted call."""
_KEY_USER, _SEARCH, _UNLINK = -4, 10, 9
_buffers: list[object] = []


def mount() -> dict[str, str]:
    """Try every kind of mount, each with a source that does not exist."""
    spot = tempfile.mkdtemp()
    here = spot.encode()
    outcomes = {
        "changing the root": attempt("pivot_root", here, here),
        "mounting": attempt("mount", b"none", here, b"swerl-no-such", 0, b""),
        "binding a folder": attempt("mount", b"/nonexistent", here, b"", _MS_BIND, b""),
        "unmounting": attempt("umount2", here, _MNT_DETACH),
        "a new file system": attempt("fsopen", b"swerl-no-such", 0),
        "a copy of the tree": attempt("open_tree", -100, b"/", _CLONE_TREE),
    }
    os.rmdir(spot)
    return _denied_or_ok(outcomes)


def namespaces() -> dict[str, str]:
    """Create new namespaces, in children of this process."""
    return {f"a new {kind} namespace": _in_child("unshare", flag) for kind, flag in _NEW.items()}


def administer() -> dict[str, str]:
    """Call administration functions with arguments that fail after the permission check."""
    nothing = b"/nonexistent/swerl-probe"
    now = time.time()
    value = struct.pack("qq", int(now), int(now % 1 * 1e9))
    no_tick = struct.pack("I4x", _ADJ_TICK) + bytes(256)  # fails late: a tick of 0
    outcomes = {
        "restarting": attempt("reboot", 0, 0, 0, 0),
        "loading a module": attempt("init_module", b"", 0, b""),
        "removing a module": attempt("delete_module", b"swerl_probe_none", 0x800),
        "swapping": attempt("swapon", nothing, 0),
        "accounting": attempt("acct", nothing),
        "loading another kernel": attempt("kexec_load", 0, 1 << 20, None, 0xFFFF_FFFF),
        "setting the clock": attempt("clock_settime", 0, value),
        "adjusting the clock": attempt("adjtimex", _address(no_tick)),
    }
    return _denied_or_ok(outcomes)


def rare_calls() -> dict[str, str]:
    """Use the system calls with which most kernel escapes begin."""
    array = struct.pack("IIII", 2, 4, 4, 1) + bytes(112)
    event = struct.pack("II", 1, 112) + bytes(104)
    handle = struct.pack("Ii", 8, 1) + struct.pack("II", 2, 0)
    root = os.open("/", os.O_RDONLY)
    answer = attempt("open_by_handle_at", root, handle, os.O_RDONLY)
    os.close(root)
    return {
        "eBPF": attempt("bpf", 0, array, len(array)),
        "watching the whole processor": attempt("perf_event_open", event, -1, 0, -1, 0),
        "io_uring": attempt("io_uring_setup", 1, _address(bytes(120))),
        "userfaultfd": attempt("userfaultfd", 0),
        "the kernel's log": attempt("syslog", 10),
        "opening a folder by its number": "ok" if answer in ("ok", "ESTALE") else answer,
    }


def make_devices() -> dict[str, str]:
    """Create device nodes of a disk and of the kernel's memory, and open them."""
    outcomes = {}
    for name, mode, device in (("disk", 0o60666, (8, 0)), ("memory", 0o20666, (1, 1))):
        path = os.path.join(tempfile.gettempdir(), f"swerl-probe-{name}-{os.getuid()}")
        try:
            os.mknod(path, mode, os.makedev(*device))
            os.close(os.open(path, os.O_RDONLY))
            outcomes[f"a node of a {name} device"] = "ok"
        except OSError as error:
            outcomes[f"a node of a {name} device"] = name_of(error)
        if os.path.exists(path):
            os.unlink(path)
    return outcomes


def enter(pid: int) -> dict[str, str]:
    """Enter the namespaces of a process."""
    outcomes = {}
    for kind in ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup"):
        try:
            fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        except OSError as error:
            outcomes[f"entering {kind}"] = name_of(error)
            continue
        outcomes[f"entering {kind}"] = _in_child("setns", fd, 0)
        os.close(fd)
    return outcomes


def leave_key(word: str) -> dict[str, str]:
    """Add a key to the user's keyring in the kernel."""
    name = word.encode()
    return {"a key": attempt("add_key", b"user", name, name, len(name), _KEY_USER)}


def find_key(word: str) -> dict[str, str]:
    """Look for that key, and remove it."""
    try:
        key = raw("keyctl", _SEARCH, _KEY_USER, b"user", word.encode(), 0)
    except OSError as error:
        return {"the key": name_of(error)}
    attempt("keyctl", _UNLINK, key, _KEY_USER)
    return {"the key": "ok"}


def _denied_or_ok(outcomes: dict[str, str]) -> dict[str, str]:
    return {name: answer if answer in _DENIED else "ok" for name, answer in outcomes.items()}


def _in_child(name: str, *arguments: int) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, attempt(name, *arguments).encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 100).decode()
    os.close(reader)
    os.waitpid(pid, 0)
    return answer


def _address(data: bytes) -> int:
    """Return the address of a copy of the data that the kernel may write to."""
    buffer = ctypes.create_string_buffer(data, max(len(data), 512))
    _buffers.append(buffer)
    return ctypes.addressof(buffer)
