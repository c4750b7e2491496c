"""`local` sandboxes of every controller are listed and removed."""

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

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Limits, new_name
from swerl.sandboxes import local
from swerl.sandboxes._local import limits

from .helpers import eventually, host_processes, sh

LIMITS = Limits(memory_mib=128, num_processes=32, disk_mib=16, lifetime_s=60)
CONTROLLER = """
import asyncio, sys
from pathlib import Path
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

async def main(name, scratch, token):
    backend = local.build(local.Options(scratch=Path(scratch)))
    limits = Limits(memory_mib=128, disk_mib=16, lifetime_s=60)
    async with backend.open("host", limits, workdir="/testbed", name=name) as sandbox:
        async with sandbox.start(["sleep", token]):
            print(backend.spawner_pid, flush=True)
            await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def names(backend: local.LocalBackend) -> list[str]:
    return [one.name for one in await backend.live()]


def groups() -> list[Path]:
    return limits.leftovers(limits.find())


async def test_another_backend_can_remove_it(backend: local.LocalBackend) -> None:
    name = new_name()
    async with backend.open("host", LIMITS, workdir="/testbed", name=name) as sandbox:
        await local.build(local.Options()).remove(name)
        with pytest.raises(SandboxLostError):
            await sandbox.run(["true"])
    assert name not in await names(backend)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".."])
async def test_a_name_that_is_a_path_is_refused(backend: local.LocalBackend, name: str) -> None:
    with pytest.raises(SandboxError) as raised:
        await backend.remove(name)
    assert raised.value.hint
    if name:
        with pytest.raises(SandboxError):
            backend.open("host", LIMITS, workdir="/testbed", name=name)


@pytest.mark.parametrize("everything", [False, True])
async def test_leftovers_of_a_killed_controller_are_found_and_removed(
    tmp_path: Path, everything: bool
) -> None:
    token, name = f"5{time.time():.6f}", new_name()
    child = subprocess.Popen(  # noqa: ASYNC220  it is another controller
        [sys.executable, "-c", CONTROLLER, name, str(tmp_path), token],
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert child.stdout
    spawner = int(child.stdout.readline())
    backend = local.build(local.Options(scratch=tmp_path))
    assert name in await names(backend)
    if everything:
        os.kill(spawner, signal.SIGSTOP)  # it must not clear away
    child.kill()
    child.wait()
    if everything:
        os.kill(spawner, signal.SIGKILL)
        assert name in await names(backend)
        await backend.remove(name)
    await eventually(lambda: not host_processes(token))
    await eventually(lambda: not list(tmp_path.iterdir()))
    await eventually(lambda: not any(path.name == name for path in groups()))
    assert name not in await names(backend)


async def test_a_process_inside_cannot_pose_as_a_sandbox(backend: local.LocalBackend) -> None:
    forged = new_name()
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        posing = f"import os; os.execv('/bin/cat', ['swerl-supervisor', '-', {forged!r}])"
        posing = posing.replace("'-', ", f"{forged!r}, '-', ")
        async with sandbox.start(["python3", "-c", posing]):
            await eventually(lambda: host_processes(f"swerl-supervisor\0{forged}"))
            assert forged not in await names(backend)


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
