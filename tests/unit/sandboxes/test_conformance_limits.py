"""Conformance of every sandbox backend: limits."""

from __future__ import annotations

import os

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Limits

from .helpers import Target, sh


def require_process_limit(sandbox: Sandbox) -> None:
    """Skip where neither a cgroup nor, because the kernel spares root, an rlimit holds."""
    if "pids" not in getattr(sandbox, "limits", {"pids"}) and os.geteuid() == 0:
        pytest.skip("root without a writable cgroup has no process limit")


async def test_a_memory_bomb_dies_alone(sandbox: Sandbox) -> None:
    script = "x = bytearray(); \nwhile True: x += bytes(1 << 24)"
    done = await sandbox.run(["python3", "-c", script], timeout_s=30)
    assert done.exit_code != 0
    assert not done.timed_out
    assert await sh(sandbox, "echo still here") == "still here\n"


async def test_a_fork_bomb_is_contained(sandbox: Sandbox) -> None:
    require_process_limit(sandbox)
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    done = await sandbox.run(["python3", "-c", bomb], timeout_s=0.2)
    assert done.timed_out
    assert await sh(sandbox, "echo still here") == "still here\n"


async def test_no_file_exceeds_the_disk_limit(sandbox: Sandbox) -> None:
    script = "head -c 400000000 /dev/zero > /tmp/big"
    done = await sandbox.run(["sh", "-c", script], timeout_s=30)
    assert done.exit_code != 0
    await sh(sandbox, "[ $(stat -c %s /tmp/big) -le 268435456 ] && rm /tmp/big && echo x > /tmp/f")


async def test_the_disk_fills_up_at_its_limit(target: Target, sandbox: Sandbox) -> None:
    target.require("disk quota")
    await sandbox.run(["sh", "-c", "head -c 400000000 /dev/zero > /tmp/big"], timeout_s=30)
    with pytest.raises(SandboxError) as raised:
        await sandbox.write("/tmp/more", bytes(8 << 20))
    assert "disk_mib" in raised.value.hint
    await sh(sandbox, "rm /tmp/big && echo x > /tmp/small")


async def test_a_sandbox_ends_with_its_lifetime(target: Target) -> None:
    limits = Limits(memory_mib=128, num_processes=16, disk_mib=16, lifetime_s=0.3)
    async with target.open(limits) as sandbox:
        with pytest.raises(SandboxLostError, match="lifetime"):
            await sandbox.run(["sleep", "60"], timeout_s=20)
        with pytest.raises(SandboxLostError):
            await sandbox.read("/etc/passwd")
