"""The first process of a `local` sandbox: nothing inside can end it, and it reaps orphans."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

from swerl.interfaces import Sandbox
from swerl.sandbox import Limits
from swerl.sandboxes import local

from .helpers import sh

LIMITS = Limits(memory_mib=256, num_processes=64, disk_mib=64, lifetime_s=60)


@pytest.fixture(params=["bwrap", "unshare"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    if request.param == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    backend = local.build(local.Options(isolator=request.param))
    async with backend.open("host", LIMITS, workdir="/testbed") as opened:
        yield opened


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_killing_every_process_ends_only_the_commands(sandbox: Sandbox, user: str) -> None:
    async with sandbox.start(["sleep", "60"]) as other:
        await sandbox.run(["bash", "-c", "kill -9 -1"], user=user)
        assert await other.wait() == 137
    await sandbox.write("/testbed/f", b"kept")
    assert await sh(sandbox, "cat f") == "kept"


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_no_signal_to_the_first_process_ends_it(sandbox: Sandbox, user: str) -> None:
    script = "for n in $(seq 64); do kill -$n 1; done; for n in $(seq 64); do kill -$n 1; done"
    await sandbox.run(["bash", "-c", script], user=user)
    script = "ls /proc | grep '^[0-9]' | xargs kill -9"
    await sandbox.run(["sh", "-c", script], user=user)
    assert await sh(sandbox, "echo still here") == "still here\n"


async def test_no_limit_can_be_put_on_the_first_process(sandbox: Sandbox) -> None:
    script = "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (1, 1))"
    done = await sandbox.run(["python3", "-c", script])
    assert b"PermissionError" in done.stderr
    script = "import resource as r; print(r.prlimit(0, r.RLIMIT_NOFILE, (9, 9)))"
    assert (await sandbox.run(["python3", "-c", script])).exit_code == 0


async def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    await sh(sandbox, "for n in $(seq 30); do (sleep 0.01 &) ; done; sleep 0.05")
    states = await sh(sandbox, "cat /proc/[0-9]*/stat | cut -d' ' -f3 | grep -c Z || true")
    assert states == "0\n"


async def test_its_memory_and_root_are_closed_and_its_name_tells_nothing(sandbox: Sandbox) -> None:
    for path in ("/proc/1/root/", "/proc/1/environ", "/proc/1/mem", "/proc/1/fd/"):
        done = await sandbox.run(["sh", "-c", f"ls {path} && head -c 1 {path}"], user="root")
        assert done.exit_code != 0
    assert (await sh(sandbox, "tr '\\0' ' ' < /proc/1/cmdline")).split() == ["sandbox"]
