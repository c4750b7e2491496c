"""Decide whether a process still runs: the one owner of that question.

A process id alone proves nothing: ids are reused, and they have a meaning only in one pid namespace
of one boot of one machine. A process is therefore identified by its id, its start time, its pid
namespace and the boot id of its kernel.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED = {"Z", "X"}
_START_FIELD = 19
"""Index of the start time among the fields of /proc/<pid>/stat that follow the program's name."""


class Life(StrEnum):
    """The state of a process, as far as this process can find out."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "elsewhere"
    """Unknown: the process belongs to another host or to another pid namespace."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine."""

    pid: int
    started: int
    """Start time in the kernel's clock ticks since boot; 0 if it could not be read."""
    place: str
    """`pid_namespace()` of that process."""
    boot: str
    """Boot id, or `host` on a system without one."""
    host: str
    """Host name and machine id: both survive a reboot."""


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    host = _host()
    started = _state(os.getpid())[1]
    return ProcessIdentity(os.getpid(), started, pid_namespace(), boot_id() or host, host)


def life(process: ProcessIdentity) -> Life:
    """Return whether this very process runs, and not a later one with the same id."""
    host = _host()
    if process.boot != (boot_id() or host):
        return Life.DEAD if process.host == host else Life.ELSEWHERE
    if process.place != pid_namespace():
        return Life.ELSEWHERE
    state, started = _state(process.pid)
    if not state and not _state(os.getpid())[0]:
        return Life.ELSEWHERE  # a system without /proc tells nothing
    is_same = started == process.started or not process.started
    return Life.ALIVE if state and state not in _ENDED and is_same else Life.DEAD


def life_at(pid: int, namespace: str, at_s: float, *, slack_s: float) -> Life:
    """Return whether the process that had this id at the Unix time `at_s` runs.

    A process that started more than `slack_s` after `at_s` reuses the id. `namespace` is the value
    of `pid_namespace()` in that process.
    """
    if namespace != pid_namespace():
        return Life.ELSEWHERE
    state, started = _state(pid)
    is_same = state and state not in _ENDED and _unix_s(started) <= at_s + slack_s
    return Life.ALIVE if is_same else Life.DEAD


def start_time_s(pid: int) -> float:
    """Return the Unix time at which a process started. Raises ProcessLookupError."""
    state, started = _state(pid)
    if not state:
        raise ProcessLookupError(f"no process {pid}")
    return _unix_s(started)


def boot_time_s() -> float:
    """Return the Unix time at which this machine booted."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot; empty on a system without one."""
    return _text(BOOT_ID)


@cache
def pid_namespace() -> str:
    """Return 6 hex digits for this boot and pid namespace: process ids compare only within one."""
    import hashlib  # 1 MiB, which every fork of the spawner of `local` would copy

    boot = boot_id() or os.uname().nodename
    namespace = Path("/proc/self/ns/pid")
    if namespace.is_symlink():
        boot += str(namespace.readlink())
    return hashlib.blake2s(boot.encode(), digest_size=3).hexdigest()


@cache
def _host() -> str:
    return f"{os.uname().nodename}/{_text(Path('/etc/machine-id'))[:8]}"


def _state(pid: int) -> tuple[str, int]:
    """Return a process's state letter and its start in clock ticks; an empty letter for none."""
    stat = _text(Path("/proc", str(pid), "stat"))
    if not stat:
        return "", 0
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[_START_FIELD])


def _unix_s(ticks: int) -> float:
    return boot_time_s() + ticks / os.sysconf("SC_CLK_TCK")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
