"""The `local` backend leaves nothing, whichever process dies and whenever."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import limits

from .helpers import eventually, host_processes, sh

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
ROOT = Path(__file__).resolve().parents[3]


CONTROLLER = """
import asyncio, sys
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

async def hold(backend, token):
    async with backend.open("host", Limits(lifetime_s=60), workdir="/testbed") as sandbox:
        await sandbox.run(["sh", "-c", f"setsid sleep {token} & echo >/testbed/up"])
        print("up", flush=True)
        await sandbox.run(["sleep", token])

async def churn(backend, token):
    while True:
        async with backend.open("host", Limits(lifetime_s=60), workdir="/testbed") as sandbox:
            await sandbox.run(["sleep", token], timeout_s=0.01)
            print("up", flush=True)

async def main(isolator, what, token):
    backend = local.build(local.Options(isolator=isolator))
    await asyncio.gather(*(globals()[what](backend, token) for _ in range(3)))

asyncio.run(main(*sys.argv[1:]))
"""


def groups(pid: int) -> list[str]:
    """Return the cgroups that sandboxes of this controller still have."""
    names = [path.name for path in limits.leftovers(limits.find())]
    return [name for name in names if name.startswith(f"swerl-{pid}-")]


@pytest.mark.parametrize("isolator", ["bwrap", "unshare"])
@pytest.mark.parametrize("delay_s", [None, 0.01, 0.017, 0.023])
async def test_a_killed_controller_leaves_nothing(isolator: str, delay_s: float | None) -> None:
    """At rest, and at moments at which it opens and closes."""
    mounts = sandbox_mounts()
    token = f"7{time.time():.6f}"
    child = subprocess.Popen(  # noqa: ASYNC220  it is another controller
        [sys.executable, "-c", CONTROLLER, isolator, "churn" if delay_s else "hold", token],
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert child.stdout
    assert [child.stdout.readline() for _ in range(3)] == [b"up\n"] * 3
    [spawner] = children(child.pid)
    if delay_s:
        await asyncio.sleep(delay_s)
    else:
        assert len(host_processes(token)) >= 4
    child.kill()
    child.communicate()
    await eventually(lambda: not host_processes(token) and not groups(child.pid))
    await eventually(lambda: b"_spawner" not in command_line(spawner))
    assert sandbox_mounts() == mounts


def sandbox_mounts() -> list[str]:
    """Return the mounts that this process sees where sandboxes are put together."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith("/sys")]


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_a_killed_spawner_ends_its_sandboxes_and_is_replaced() -> None:
    backend = local.build(local.Options())
    token = f"8{time.time():.6f}"
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        running = asyncio.ensure_future(sandbox.run(["sleep", token]))
        await eventually(lambda: host_processes(token))
        os.kill(backend.spawner_pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="gone"):
            await running
    await eventually(lambda: not host_processes(token))
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "echo again") == "again\n"


async def test_a_dropped_backend_ends_its_spawner() -> None:
    backend = local.build(local.Options())
    async with backend.open("host", LIMITS, workdir="/testbed"):
        pid = backend.spawner_pid
    assert Path(f"/proc/{pid}").exists()
    del backend
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
