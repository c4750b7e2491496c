"""Who opened a sandbox, and whether that process still runs."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from swerl.core.sandbox import place

_NAME = re.compile(r"swerl-(\d+)-([0-9a-f]{6})[0-9a-f]{10}")
_ENDED = {"Z", "X"}
_CLOCK_SLACK_S = 60.0
"""How far a provider's clock may be from this machine's."""


class Life(StrEnum):
    """What is known about an owner."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "elsewhere"
    """On another host or in another pid namespace: nothing here can tell."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One process on one boot of one machine."""

    pid: int
    started: int
    """When it began, in the kernel's clock ticks since boot; 0 where that cannot be read."""
    place: str
    """Where its process id means something, as `swerl.core.sandbox.place` says."""
    boot: str
    """Id of this boot of the kernel."""
    host: str
    """Host name and machine id: they stay when the machine boots again."""


def current() -> Owner:
    """Return this process."""
    pid = os.getpid()
    boot, host = _machine()
    return Owner(pid, _status(pid)[1], place(), boot, host)


def life(owner: Owner) -> Life:
    """Say whether a process still runs; its id alone would not do, as ids are used again."""
    boot, host = _machine()
    if owner.boot != boot:
        return Life.DEAD if owner.host == host else Life.ELSEWHERE
    if owner.place != place():
        return Life.ELSEWHERE
    state, started = _status(owner.pid)
    same = started == owner.started or not owner.started
    return Life.ALIVE if state and state not in _ENDED and same else Life.DEAD


def life_by_name(name: str, began_s: float = 0.0) -> Life:
    """Say whether the owner that a sandbox's name tells still runs.

    `began_s` is when the sandbox began, seconds since 1970, or 0: a process that began later is
    another one with the same id.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[2] != place():
        return Life.ELSEWHERE
    state, started = _status(int(match[1]))
    if not state or state in _ENDED:
        return Life.DEAD
    younger = began_s and _unix_s(started) > began_s + _CLOCK_SLACK_S
    return Life.DEAD if younger else Life.ALIVE


def pid_of(name: str) -> int:
    """Return the process id in a sandbox's name, 0 where it has none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


@cache
def _machine() -> tuple[str, str]:
    """Return the id of this boot, and a name for this machine."""
    machine = _text("/etc/machine-id")[:8]
    host = f"{platform.node()}/{machine}"
    return _text("/proc/sys/kernel/random/boot_id") or host, host


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, int]:
    """Return a process's state letter and start in clock ticks; an empty letter for none."""
    stat = _text(f"/proc/{pid}/stat")
    if not stat:
        return "", 0
    after_name = stat.rpartition(")")[2].split()
    return after_name[0], int(after_name[19])


def _unix_s(ticks: int) -> float:
    """Return seconds since 1970 of a moment given in clock ticks since boot."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")
