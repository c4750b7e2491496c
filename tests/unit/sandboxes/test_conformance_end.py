"""Conformance of every sandbox backend: closing, removal, loss."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxLostError
from swerl.core.sandbox import new_name

from .helpers import Target, host_processes, sh, until


async def test_closing_kills_everything(target: Target) -> None:
    token = f"{time.time():.6f}"
    async with target.open() as sandbox:
        await sh(sandbox, f"setsid sleep 1{token} >/dev/null 2>&1 &")
        running = asyncio.ensure_future(sandbox.run(["sleep", f"2{token}"]))
        await until(sandbox, f"sleep 2{token}", 1)
        assert host_processes(token)
    assert not host_processes(token)
    with pytest.raises(SandboxLostError):
        await running


async def test_a_closed_sandbox_refuses_commands(target: Target) -> None:
    async with target.open() as sandbox:
        pass
    with pytest.raises(SandboxLostError):
        await sandbox.run(["true"])
    with pytest.raises(SandboxLostError):
        await sandbox.read("/etc/passwd")


async def test_an_error_in_the_body_closes_the_sandbox_and_propagates(target: Target) -> None:
    token = f"{time.time():.6f}"
    with pytest.raises(ZeroDivisionError):
        async with target.open() as sandbox:
            await sh(sandbox, f"sleep 3{token} >/dev/null 2>&1 &")
            raise ZeroDivisionError
    assert not host_processes(token)


async def test_sixteen_open_at_once(target: Target) -> None:
    async def one(number: int) -> bytes:
        async with target.open() as sandbox:
            await sandbox.write("f", str(number).encode())
            return (await sandbox.run(["cat", "/f"])).stdout

    answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert answers == [str(number).encode() for number in range(16)]


async def test_a_kill_from_outside_is_a_lost_sandbox(sandbox: Sandbox) -> None:
    pid = getattr(sandbox, "pid", 0)
    if not pid:
        pytest.skip("this backend's first process is not on this machine")
    running = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
    await sandbox.run(["true"])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxLostError, match="killed"):
        await running


async def test_a_sandbox_is_listed_by_its_name_until_it_is_closed(target: Target) -> None:
    name = new_name()
    async with target.open(name=name):
        [live] = [one for one in await target.backend.live() if one.name == name]
        assert live.id
        assert abs(live.started_unix_s - time.time()) < 60
    await until_gone(target, name)


@pytest.mark.parametrize("wait_s", [0.0, 0.005, 0.05, 0.15])
async def test_a_cancelled_open_leaves_nothing(target: Target, wait_s: float) -> None:
    name = new_name()

    async def hold() -> None:
        async with target.open(name=name):
            await asyncio.sleep(60)

    opening = asyncio.ensure_future(hold())
    await asyncio.sleep(wait_s)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until_gone(target, name)


async def until_gone(target: Target, name: str) -> None:
    """Wait until nothing of a sandbox is left; what held its limits goes a moment after it."""
    async with asyncio.timeout(10):
        while name in {one.name for one in await target.backend.live()}:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.01)
