"""Conformance of every sandbox backend: timeouts, cancellation and output."""

from __future__ import annotations

import asyncio
import time

import pytest

from swerl.core.contracts import Sandbox

from .helpers import processes, sh, until


async def test_a_timeout_is_124_and_keeps_the_output(sandbox: Sandbox) -> None:
    done = await sandbox.run(["sh", "-c", "echo early; sleep 60"], timeout_s=0.5)
    assert (done.exit_code, done.timed_out, done.stdout) == (124, True, b"early\n")


DAEMONS = """
sleep 61 &
setsid sleep 61 &
(setsid sh -c 'sleep 61 & sleep 61' &)
python3 -c '
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "61")
    os._exit(0)
os.wait()'
sleep 61
"""


async def test_a_timeout_kills_daemons_of_other_sessions(sandbox: Sandbox) -> None:
    bystander = asyncio.ensure_future(sandbox.run(["sleep", "62"]))
    victim = asyncio.ensure_future(sandbox.run(["sh", "-c", DAEMONS], timeout_s=5.0))
    await until(sandbox, "sleep 61", 6)
    assert (await victim).timed_out
    assert await processes(sandbox, "sleep 61") == 0
    assert await processes(sandbox, "sleep 62") == 1
    bystander.cancel()


async def test_cancelling_a_run_kills_the_command(sandbox: Sandbox) -> None:
    run = asyncio.ensure_future(sandbox.run(["sh", "-c", "setsid sleep 63 & sleep 63"]))
    await until(sandbox, "sleep 63", 2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(sandbox, "sleep 63", 0)


async def test_output_over_the_cap_is_dropped_without_a_deadlock(sandbox: Sandbox) -> None:
    script = "head -c 3000000 /dev/zero; head -c 700000 /dev/zero >&2; exit 3"
    done = await sandbox.run(["sh", "-c", script], timeout_s=20)
    assert (done.exit_code, done.truncated) == (3, True)
    assert (len(done.stdout), len(done.stderr)) == (1 << 19, 1 << 19)


async def test_endless_output_ends_at_the_timeout(sandbox: Sandbox) -> None:
    done = await sandbox.run(["yes"], timeout_s=0.2)
    assert done.timed_out
    assert done.truncated or len(done.stdout) < 1 << 19


async def test_the_clock_cannot_be_set(sandbox: Sandbox) -> None:
    done = await sandbox.run(["date", "-s", "2001-01-01"], user="root")
    assert done.exit_code != 0
    assert abs(float(await sh(sandbox, "date +%s")) - time.time()) < 5
