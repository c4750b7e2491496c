"""Attacks that exceed a limit. Each also stops at a bound of its own, to protect the host."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from swerl.core.errors import SandboxError
from swerl.core.sandbox import Limits
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    DiedError,
    OpenSandbox,
    attack,
    failed,
    judge,
    passed,
)

_SMALL = Limits(memory_mib=128, num_processes=32, num_cpus=0.5, disk_mib=32, lifetime_s=60)
_TINY = replace(_SMALL, memory_mib=64)
_SLACK = 1.3
_MOST_OUTPUT = 64 << 20
_MOST_FILES, _FILES_S = 200_000, 4.0
_MOST_DESCRIPTORS = 1 << 20
_BURN_S = 1.0
_IDLE = 0.2
"""Minimum idle processors for a PASS: on a busier machine, the limit may not be the cause."""
_INOTIFY = 1 << 12
_FOLDERS = ("/tmp", "/var/tmp", "/home/agent", "/run", "/mnt")


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an attack that consumes a resource."""

    what: str
    """Amount that it got; empty if it was killed before it could report."""
    reason: str


@attack("Starts processes without end.", limits=_SMALL)
async def fork_bomb(ctx: AttackContext) -> AttackFinding:
    most = ctx.limits.num_processes
    end = await _take(ctx.box, "greedy.fork", most * 4)
    return await _held(ctx, "pids", end, f"the limit is {most}")


@attack("Allocates memory without end.", limits=_SMALL)
async def memory_bomb(ctx: AttackContext) -> AttackFinding:
    most = ctx.limits.memory_mib
    end = await _take(ctx.box, "greedy.hold_memory", most * 3)
    return await _held(ctx, "memory", end, f"the limit is {most} MiB")


@attack("Allocates memory in many processes, each below the limit.", limits=_SMALL)
async def memory_in_pieces(ctx: AttackContext) -> AttackFinding:
    most = ctx.limits.memory_mib
    end = await _take(ctx.box, "greedy.hold_memory_together", 6, most // 2)
    number = int(end.what.split()[0]) if end.what else 0
    end = _End(end.what, "ok" if number * (most // 2) > most * _SLACK else "killed")
    return await _held(ctx, "memory", end, f"the limit is {most} MiB for all")


@attack("Fills /dev and /dev/shm, whose files are kept in memory.", limits=_SMALL)
async def memory_files(ctx: AttackContext) -> AttackFinding:
    most = ctx.limits.memory_mib
    end = await _take(ctx.box, "greedy.fill", ["/dev/shm", "/dev"], most * 3)
    return await _held(ctx, "memory", end, f"the limit is {most} MiB of memory")


@attack("Fills every writable folder on its disk.", limits=_SMALL)
async def disk_fill(ctx: AttackContext) -> AttackFinding:
    most = ctx.limits.disk_mib
    look = 'for d in "$@"; do [ -w "$d" ] && echo "$d"; done; true'
    folders = (await ctx.box.sh(look, ctx.workdir, *_FOLDERS)).stdout.decode().split()
    if not folders:
        raise CannotError("the sandbox has no writable folder")
    end = await _take(ctx.box, "greedy.fill", folders, most * 3)
    return await _held(ctx, "disk", end, f"the limit is {most} MiB")


@attack("Creates empty files without end; they use no bytes of disk.", limits=_TINY, timeout_s=30)
async def inode_fill(ctx: AttackContext) -> AttackFinding:
    end = await _take(
        ctx.box, "greedy.make_files", ctx.workdir, _MOST_FILES, _FILES_S, timeout_s=20
    )
    return await _held(ctx, "disk", end, f"the bound is {_MOST_FILES:,} or {_FILES_S:.0f} s")


@attack("Computes in more processes than it has processors.", limits=_SMALL, alone=True)
async def processor_hog(ctx: AttackContext) -> AttackFinding:
    idle_before, started = _idle_s(), time.monotonic()
    used = await ctx.box.attack("greedy.burn", 4, _BURN_S)
    idle = (_idle_s() - idle_before) / (time.monotonic() - started)
    share = float(used["cpu_s"]) / float(used["wall_s"])
    seen = f"{share:.2f} processors used; the limit is {ctx.limits.num_cpus}"
    if share > ctx.limits.num_cpus * _SLACK:
        _need_own_limit(ctx, "cpu", seen)
        return failed(seen)
    if idle < _IDLE and not ctx.target.own_kernel:
        raise CannotError(f"{seen}; the machine was too busy to give more")
    return passed(seen)


@attack("Opens files without closing any, to exhaust the host's file descriptors.", limits=_SMALL)
async def descriptor_exhaustion(ctx: AttackContext) -> AttackFinding:
    end = await _take(ctx.box, "greedy.open_files", _MOST_DESCRIPTORS)
    return await _held(ctx, "memory", end, f"the bound is {_MOST_DESCRIPTORS:,}")


@attack("Prints without end.")
async def endless_output(ctx: AttackContext) -> AttackFinding:
    done = await ctx.box.run(["sh", "-c", "yes swerl; yes swerl >&2"], timeout_s=1.0)
    size = len(done.stdout) + len(done.stderr)
    if not done.timed_out:
        raise CannotError(f"it ended with code {done.exit_code}: {done.text[:80]}")
    holes = [f"{size >> 20} MiB of output were kept"] if size > _MOST_OUTPUT else []
    return judge(holes, f"{size >> 10} KiB kept in {done.duration_s:.1f} s, until the timeout")


@attack("Prints 100 MB without a line break.")
async def giant_line(ctx: AttackContext) -> AttackFinding:
    script = "head -c 100000000 /dev/zero | tr '\\0' x"
    done = await ctx.box.sh(script, timeout_s=2)
    size = len(done.stdout)
    if size > _MOST_OUTPUT:
        return failed(f"{size >> 20} MiB of output were kept")
    return await _still_there(ctx.box, f"{size >> 10} KiB of 97,656 kept")


@attack("Exhausts inotify instances, which the kernel counts by user, for the host's user too.")
async def counted_by_user(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    taking = asyncio.ensure_future(ctx.box.attack("greedy.watch", _INOTIFY))
    try:
        starved = False
        until = time.monotonic() + 3
        while not taking.done() and not starved and time.monotonic() < until:
            await asyncio.sleep(0.1)
            starved = not _can_watch()
        outcomes = await taking
    finally:
        taking.cancel()
    [(what, reason)] = outcomes.items()
    holes = ["the host's user can create no inotify instance"] if starved else []
    return judge(holes, f"{what}: {reason}")


def _idle_s() -> float:
    """Return the total idle seconds of this machine's processors."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")


def _can_watch() -> bool:
    fd = int(ctypes.CDLL(None).inotify_init1(0))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


async def _take(box: OpenSandbox, function: str, *arguments: object, timeout_s: float = 12) -> _End:
    """Run an attack that the limit may kill."""
    try:
        outcomes = await box.attack(function, *arguments, timeout_s=timeout_s)
    except DiedError as error:
        return _End("", f"killed with exit code {error.exit_code}")
    [(what, reason)] = outcomes.items()
    return _End(what, reason)


async def _held(ctx: AttackContext, kind: str, end: _End, limit: str) -> AttackFinding:
    """FAIL if nothing stopped the attack, or if the sandbox does not answer afterwards."""
    seen = f"{end.what}: {end.reason}" if end.what else end.reason
    if end.reason == "ok":
        _need_own_limit(ctx, kind, end.what)
        return failed(f"{end.what}, and nothing stopped it; {limit}")
    return await _still_there(ctx.box, f"{seen}; {limit}")


def _need_own_limit(ctx: AttackContext, kind: str, what: str) -> None:
    """Raise CannotError if the provider sets the machine's size instead of our limits."""
    sandbox = ctx.box.sandbox
    ours = ctx.target.backend.price(ctx.limits) == 0 or kind in getattr(sandbox, "limits", ())
    if not ours:
        raise CannotError(f"{what}: the provider sets the machine's size instead of our limits")


async def _still_there(box: OpenSandbox, seen: str) -> AttackFinding:
    try:
        done = await box.run(["echo", "here"])
    except SandboxError as error:
        return failed(f"the sandbox does not answer after {seen}: {error}")
    return judge([] if done.stdout == b"here\n" else [f"it answers {done.text[:80]!r}"], seen)
