"""Attacks that exceed a limit; each stops at a bound that the caller gives."""

from __future__ import annotations

import os
import resource
import select
import signal
import time

from tests.attacks.inside.calls import name_of, raw

_PIECE = 1 << 20
_ROUNDS, _ANSWER_S = 2, 1.0


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
    held = _memory(most_mib)
    return {f"{len(held)} MiB": "ok" if len(held) == most_mib else "MemoryError"}


def hold_memory_together(num: int, each_mib: int) -> dict[str, str]:
    """Allocate memory in several processes; count those that can still use all of it."""
    children = [_start_holder(each_mib) for _ in range(num)]
    holding = []
    for _ in range(_ROUNDS):  # the second round may kill a process that answered in the first
        holding = [child for child in children if _still_holds(child)]
    for pid, _, _ in children:
        os.kill(pid, signal.SIGKILL)
    return {f"{len(holding)} of {num} processes hold {each_mib} MiB each": "ok"}


def fill(folders: list[str], most_mib: int) -> dict[str, str]:
    """Write to each folder until that is refused; free the space after the last folder.

    The files are unlinked while open, so nothing is left if this process is killed.
    """
    held = []
    reason, total = "ok", 0
    for folder in folders:
        path = os.path.join(folder, f"swerl-probe-fill-{os.getpid()}")
        try:
            held.append(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            os.unlink(path)
            while total < most_mib:
                total += os.write(held[-1], bytes(_PIECE)) // _PIECE
        except OSError as error:
            reason = name_of(error)
    for fd in held:
        os.close(fd)
    return {f"{total} MiB": "ok" if total >= most_mib else reason}


def make_files(folder: str, most: int, wall_s: float) -> dict[str, str]:
    """Create empty files until that is refused or takes too long, then remove them."""
    base = os.path.join(folder, "swerl-probe-inodes")
    os.mkdir(base)
    reason, num, until = "ok", 0, time.monotonic() + wall_s
    try:
        while num < most and time.monotonic() < until:
            os.close(os.open(os.path.join(base, str(num)), os.O_CREAT | os.O_WRONLY))
            num += 1
    except OSError as error:
        reason = name_of(error)
    for name in os.listdir(base):
        os.unlink(os.path.join(base, name))
    os.rmdir(base)
    return {f"{num} files": reason}


def burn(num: int, wall_s: float) -> dict[str, str]:
    """Compute in several processes; return the processor seconds and the wall seconds."""
    started = time.monotonic()
    pids = []
    for _ in range(num):
        pid = os.fork()
        if pid == 0:
            while time.monotonic() - started < wall_s:
                pass
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.monotonic() - started
    return {"cpu_s": f"{used.ru_utime + used.ru_stime:.3f}", "wall_s": f"{wall:.3f}"}


def open_files(most: int) -> dict[str, str]:
    """Open files without closing any, until that is refused."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held, reason = [], "ok"
    try:
        for _ in range(most):
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        reason = name_of(error)
    os.closerange(3, max(held, default=3) + 1)
    return {f"{len(held)} files": reason}


def watch(most: int) -> dict[str, str]:
    """Create inotify instances, of which a user has few, until that is refused."""
    num, reason = 0, "ok"
    try:
        while num < most:
            raw("inotify_init1", 0)
            num += 1
    except OSError as error:
        reason = name_of(error)
    time.sleep(0.8)
    return {f"{num} watchers": reason}


def _memory(most_mib: int) -> list[bytearray]:
    held: list[bytearray] = []
    try:
        while len(held) < most_mib:
            held.append(bytearray(os.urandom(64)) * (_PIECE // 64))
    except MemoryError:
        pass
    return held


def _start_holder(mib: int) -> tuple[int, int, int]:
    """Start a process that holds memory; return its pid, request pipe and reply pipe."""
    requests_in, requests_out = os.pipe()
    replies_in, replies_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        low, high = sorted((requests_in, replies_out))
        for first, last in ((3, low), (low + 1, high), (high + 1, 1 << 12)):
            os.closerange(first, last)  # else the other holders would keep its pipes open
        held = _memory(mib)
        while len(held) == mib and os.read(requests_in, 1):
            for piece in held:
                piece[:: resource.getpagesize()] = bytes(len(piece) // resource.getpagesize())
            os.write(replies_out, b"y")
        os._exit(0)
    os.close(requests_in)
    os.close(replies_out)
    return pid, requests_out, replies_in


def _still_holds(child: tuple[int, int, int]) -> bool:
    _, requests, replies = child
    try:
        os.write(requests, b"?")
    except BrokenPipeError:
        return False
    ready, _, _ = select.select([replies], [], [], _ANSWER_S)
    return bool(ready and os.read(replies, 1))
