"""Attacks that exceed a limit, or outlive one. Each stops at a bound, to protect the host."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes._local import limits

from .box import LIMITS, USERS, Box, eventually, new_word, processes_with, worked

SMALL = replace(LIMITS, memory_mib=128, num_processes=32, num_cpus=0.5, disk_mib=32)
FOLDERS = ["/testbed", "/tmp", "/var/tmp", "/home/agent", "/run"]
NEEDS_GROUPS = pytest.mark.skipif(not limits.find(), reason="no writable control group")
IGNORING = 'trap "" HUP INT TERM QUIT USR1 USR2 PIPE CHLD TSTP; while :; do sleep 0.05; done'
DETACHED = 'setsid sh -c \'trap "" TERM HUP; while :; do sleep 0.05; done\' "$0" >/dev/null 2>&1 &'
DAEMON = """
import ctypes, os, signal, sys, time
for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
ctypes.CDLL(None).prctl(15, sys.argv[1][:15].encode(), 0, 0, 0)
for fd in (0, 1, 2): os.dup2(os.open("/dev/null", os.O_RDWR), fd)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("greedy.fork", (128,)),
        ("greedy.hold_memory", (384,)),
        pytest.param("greedy.hold_memory_together", (6, 64), marks=NEEDS_GROUPS),
        ("greedy.fill", (FOLDERS, 96)),
        ("greedy.fill", (["/dev/shm", "/dev"], 384)),
        ("greedy.make_files", ("/testbed", 200_000, 4.0)),
        ("greedy.open_files", (1 << 20,)),
    ],
)
async def test_a_limit_holds_and_the_sandbox_still_answers(
    box: Box, program: str, arguments: tuple[object, ...]
) -> None:
    async with box.other(SMALL) as small:
        outcomes = await small.attack(program, *arguments)
        # Files without content fill only the disk's table of files: any end is fine.
        assert not worked(outcomes) or program == "greedy.make_files", outcomes
        assert (await small.sh("echo here")).stdout == b"here\n"


@NEEDS_GROUPS
async def test_processors_are_shared_out(box: Box) -> None:
    async with box.other(SMALL) as small:
        assert float((await small.attack("greedy.burn", 4, 1.0))["cpus"]) < 0.5 * 1.5


@pytest.mark.parametrize("script", ["yes swerl; yes swerl >&2", "tr '\\0' x </dev/zero"])
async def test_endless_output_is_cut(box: Box, script: str) -> None:
    done = await box.sandbox.run(["sh", "-c", script], timeout_s=2.0)
    assert done.timed_out
    assert len(done.stdout) + len(done.stderr) < 64 << 20


@pytest.mark.parametrize(
    "script",
    [IGNORING, "kill -STOP $$; while :; do sleep 0.05; done", f"{DETACHED} {IGNORING}"],
    ids=["ignores signals", "stops itself", "detaches a child"],
)
async def test_no_command_outlives_its_time_limit(box: Box, script: str) -> None:
    word = new_word()
    async with asyncio.timeout(15):
        done = await box.sandbox.run(["sh", "-c", script, word], timeout_s=0.5)
    assert done.timed_out
    assert await eventually(lambda: not processes_with(word))


async def test_a_child_that_holds_the_output_does_not_delay_the_end(box: Box) -> None:
    started = time.monotonic()
    assert not (await box.sh("sleep 30 & echo done")).timed_out
    assert time.monotonic() - started < 10


async def test_no_daemon_outlives_its_sandbox(box: Box) -> None:
    word = new_word()
    async with box.other() as other:
        await other.sandbox.run(["python3", "-c", DAEMON, word], timeout_s=10)
        assert await eventually(lambda: bool(processes_with(word)))
    assert await eventually(lambda: not processes_with(word))


async def test_a_sandbox_ends_with_its_lifetime(box: Box) -> None:
    word = new_word()
    with pytest.raises(SandboxLostError):
        async with box.other(replace(SMALL, lifetime_s=1.0)) as other:
            await other.sandbox.run(["sh", "-c", IGNORING, word], timeout_s=20)
    assert await eventually(lambda: not processes_with(word))


async def test_killing_everything_inside_does_no_harm(box: Box) -> None:
    for user in USERS:
        with suppress(SandboxError):
            await box.sh("kill -9 -1; kill -9 1; kill -15 1", user=user)
    assert (await box.sh("echo here")).stdout == b"here\n"
