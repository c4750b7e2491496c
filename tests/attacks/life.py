"""Attacks on the end of commands and sandboxes: outlive it, or cause it early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Limits
from tests.attacks._targets import new_word
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    OpenSandbox,
    attack,
    failed,
    judge,
    processes_with,
)

_TIMEOUT_S = 0.5
_PATIENCE_S = 8.0
_SHORT = Limits(memory_mib=128, num_processes=32, disk_mib=32, lifetime_s=1.0)
_IGNORING = 'trap "" HUP INT TERM QUIT USR1 USR2 PIPE CHLD TSTP; while :; do sleep 0.05; done'
_DAEMON = """
import os, signal, sys, time
for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open("/proc/self/comm", "w").write(sys.argv[1][:15])
os.chdir("/")
for fd in (0, 1, 2): os.dup2(os.open("/dev/null", os.O_RDWR), fd)
time.sleep(60)
"""


@attack("Ignores every signal that can be ignored, to survive its timeout.")
async def stubborn_command(ctx: AttackContext) -> AttackFinding:
    return await _outlives_timeout(ctx.box, ["sh", "-c", _IGNORING, new_word()])


@attack("Stops itself with SIGSTOP, to survive its timeout.")
async def stopped_command(ctx: AttackContext) -> AttackFinding:
    script = "kill -STOP $$; while :; do sleep 0.05; done"
    return await _outlives_timeout(ctx.box, ["sh", "-c", script, new_word()])


@attack("Leaves a process in its own session, to survive the timeout.")
async def detached_child(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    child = 'setsid sh -c \'trap "" TERM HUP; while :; do sleep 0.05; done\' "$0" >/dev/null 2>&1 &'
    return await _outlives_timeout(ctx.box, ["sh", "-c", f"{child} {_IGNORING}", word])


@attack("Leaves a child that holds the output open, so that the command seems endless.")
async def held_output(ctx: AttackContext) -> AttackFinding:
    started = time.monotonic()
    done = await ctx.box.run(["sh", "-c", "sleep 30 & echo done"], timeout_s=_PATIENCE_S)
    wall_s = time.monotonic() - started
    holes = [f"it took {wall_s:.1f} s"] if done.timed_out or wall_s > _PATIENCE_S / 2 else []
    return judge(holes, f"it ended after {wall_s * 1e3:.0f} ms")


@attack("Leaves a renamed daemon that ignores signals, to outlive the sandbox.")
async def outlives_close(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with ctx.open() as box:
        name = getattr(box.sandbox, "id", "")
        started = await box.run(["python3", "-c", _DAEMON, word])
        if started.exit_code != 0:
            raise CannotError(f"cannot start a daemon: {started.text.strip()[-100:]}")
        seen = await _eventually(lambda: bool(processes_with(word)), 1.0)
    if ctx.target.own_kernel or not seen:
        names = [live.name for live in await ctx.target.backend.live()]
        return judge(
            [f"{name} is still there"] if name in names else [], "its provider lists it no more"
        )
    gone = await _eventually(lambda: not processes_with(word), 2.0)
    return judge(
        [] if gone else [f"processes {processes_with(word)} are alive"], "it ended with the sandbox"
    )


@attack("Kills every process that it can, including process 1 of the sandbox.")
async def kills_everything(ctx: AttackContext) -> AttackFinding:
    if ctx.shares("pid"):
        return failed(
            "it shares the host's process ids: not tried, because it would kill host processes"
        )
    for user in ctx.users:
        await ctx.box.run(["sh", "-c", "kill -9 -1; kill -9 1; kill -15 1"], user=user)
    return await _answers(ctx.box)


@attack("Exceeds the lifetime of its sandbox.")
async def lifetime(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    started = time.monotonic()
    try:
        async with ctx.open(_SHORT) as box:
            started = time.monotonic()
            await box.run(["sh", "-c", _IGNORING, word], timeout_s=_PATIENCE_S)
    except SandboxLostError:  # on a busy machine it may expire before it is open
        lasted = time.monotonic() - started
        gone = await _eventually(lambda: not processes_with(word), 2.0)
        return judge(
            [] if gone else [f"processes {processes_with(word)} are alive"],
            f"it ended after {lasted:.1f} s of its {_SHORT.lifetime_s} s",
        )
    return failed(
        f"it was open after {_PATIENCE_S:.0f} s, with a lifetime of {_SHORT.lifetime_s} s"
    )


async def _outlives_timeout(box: OpenSandbox, argv: list[str]) -> AttackFinding:
    """Run a command that does not end by itself; FAIL if it survives its timeout."""
    word = argv[-1]
    started = time.monotonic()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            done = await box.run(argv, timeout_s=_TIMEOUT_S)
    except TimeoutError:
        return failed(f"the command had not ended after {_PATIENCE_S:.0f} s")
    if not done.timed_out:
        raise CannotError(f"it ended early with code {done.exit_code}: {done.text.strip()[:100]}")
    left = await _inside(box, word)
    seen = f"gone {time.monotonic() - started - _TIMEOUT_S:.1f} s after its timeout"
    return judge([f"{left} processes are alive"] if left else [], seen)


async def _inside(box: OpenSandbox, word: str) -> int:
    """Count the processes inside with this word in their command line."""
    script = (
        'n=0; for f in /proc/[0-9]*/cmdline; do case "$(tr "\\0" " " <"$f" 2>/dev/null)" in '
        '*"$1$2"*) n=$((n+1));; esac; done; echo $n'
    )
    half = len(word) // 2  # halves, so that the counting shell does not count itself
    done = await box.sh(script, word[:half], word[half:])
    return int(done.stdout or b"0")


async def _answers(box: OpenSandbox) -> AttackFinding:
    try:
        done = await box.run(["echo", "here"])
    except SandboxError as error:
        return failed(f"the sandbox is gone: {error}")
    return judge([] if done.stdout == b"here\n" else ["it does not answer"], "it still answers")


async def _eventually(true: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.02)
    return True
