"""Attacks that exceed a limit; each stops at a bound that the caller gives."""

from __future__ import annotations

import os
import resource
import signal
import time

from tests.attacks.inside.calls import name_of

_PIECE = 1 << 20


def fork(most: int) -> dict[str, str]:
    """Start waiting processes until the kernel refuses."""
    pids = []
    reason = "ok"
    for _ in range(most):
        try:
            pid = os.fork()
        except OSError as error:
            reason = name_of(error)
            break
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return {f"{len(pids)} processes": reason}


def hold_memory(most_mib: int) -> dict[str, str]:
    """Allocate and touch memory until the kernel refuses."""
    blocks = _memory(most_mib)
    return {f"{len(blocks)} MiB": "ok" if len(blocks) == most_mib else "MemoryError"}


def hold_memory_together(num: int, each_mib: int) -> dict[str, str]:
    """Allocate memory in several processes at once; ok if none of them is stopped."""
    pids = []
    for _ in range(num):
        pid = os.fork()
        if pid == 0:
            blocks = _memory(each_mib)
            time.sleep(2)
            os._exit(len(blocks) < each_mib)
        pids.append(pid)
    stopped = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    return {f"{num} processes with {each_mib} MiB": f"{stopped} stopped" if stopped else "ok"}


def fill(folders: list[str], most_mib: int) -> dict[str, str]:
    """Write to each folder until that is refused. The files have no names."""
    files = []
    reason, total = "no folder", 0
    for folder in folders:
        path = os.path.join(folder, f"swerl-probe-fill-{os.getpid()}")
        try:
            files.append(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            os.unlink(path)
            while total < most_mib:
                total += os.write(files[-1], bytes(_PIECE)) // _PIECE
        except OSError as error:
            reason = name_of(error)
    for fd in files:
        os.close(fd)
    return {f"{total} MiB": "ok" if total >= most_mib else reason}


def make_files(folder: str, most: int, wall_s: float) -> dict[str, str]:
    """Create empty files until that is refused or takes too long."""
    base = os.path.join(folder, "swerl-probe-inodes")
    os.mkdir(base)
    num, until = 0, time.monotonic() + wall_s
    try:
        while num < most and time.monotonic() < until:
            os.close(os.open(os.path.join(base, str(num)), os.O_CREAT | os.O_WRONLY))
            num += 1
    except OSError as error:
        return {f"{num} files": name_of(error)}
    return {f"{num} files": "ok"}


def open_files(most: int) -> dict[str, str]:
    """Open files without closing any, until that is refused."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num = 0
    try:
        for _ in range(most):
            os.open("/dev/null", os.O_RDONLY)
            num += 1
    except OSError as error:
        os.closerange(3, num + 8)
        return {f"{num} files": name_of(error)}
    return {f"{num} files": "ok"}


def _memory(most_mib: int) -> list[bytearray]:
    blocks: list[bytearray] = []
    try:
        while len(blocks) < most_mib:
            blocks.append(bytearray(os.urandom(64)) * (_PIECE // 64))
    except MemoryError:
        pass
    return blocks
