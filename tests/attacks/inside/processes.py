"""Attacks on processes outside the sandbox, through /proc and signals."""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from tests.attacks.inside.calls import attempt, name_of

_ATTACH, _DETACH, _WAIT_ALL = 16, 17, 0x4000_0000
_CODE = 0x40_0000
_UP = "/.." * 12


def search(word: str) -> dict[str, str]:
    """Look for a word in the files of every other process."""
    outcomes = {}
    for pid in _pids():
        for kind in ("cmdline", "environ", "maps", "mountinfo"):
            if word.encode() in _read(f"/proc/{pid}/{kind}"):
                outcomes[f"/proc/{pid}/{kind}"] = "ok"
    return outcomes


def read_through(paths: list[str], word: str) -> dict[str, str]:
    """Read host files directly, and through the root, folder and descriptors of every process."""
    ways = [""]
    for pid in ["self", *_pids()]:
        ways += [f"/proc/{pid}/root", f"/proc/{pid}/cwd{_UP}"]
        ways += [path + _UP for path in _descriptors(pid)]
    return {
        way or path: "ok" for way in ways for path in paths if word.encode() in _read(way + path)
    }


def descriptors() -> dict[str, str]:
    """Return the descriptors of this process beyond the three standard ones."""
    outcomes = {}
    for path in _descriptors("self"):
        try:
            target = os.readlink(path)
        except OSError:
            continue  # the descriptor that listed the folder
        if int(os.path.basename(path)) > 2:
            outcomes[path] = f"ok leads to {target}"
    return outcomes


def read_and_kill(pid: int) -> dict[str, str]:
    """Read the memory of a process, trace it and kill it."""
    buffer = ctypes.create_string_buffer(8)
    local = struct.pack("QQ", ctypes.addressof(buffer), 8)
    answer = attempt("process_vm_readv", pid, local, 1, struct.pack("QQ", _CODE, 8), 1, 0)
    outcomes = {"reading memory": "ok" if answer == "EFAULT" else answer}  # EFAULT: permitted
    outcomes["tracing"] = attempt("ptrace", _ATTACH, pid)
    if outcomes["tracing"] == "ok":
        os.waitpid(pid, _WAIT_ALL)
        attempt("ptrace", _DETACH, pid)
    try:
        os.kill(pid, signal.SIGKILL)
        outcomes["killing"] = "ok"
    except OSError as error:
        outcomes["killing"] = name_of(error)
    return outcomes


def _pids() -> list[str]:
    this = str(os.getpid())
    return [name for name in os.listdir("/proc") if name.isdigit() and name != this]


def _descriptors(pid: str) -> list[str]:
    folder = f"/proc/{pid}/fd"
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 20)
    except OSError:
        return b""
    finally:
        os.close(fd)
