"""A helper process that is stopped, as on a frozen host, delays nobody beyond a deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import process, sandbox

from .helpers import eventually

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
DEADLINE_S = 60.0
"""Far above every deadline below: only a wait without one lasts longer."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S", 0.5)
    monkeypatch.setattr(process, "CLOSE_S", 0.5)
    monkeypatch.setattr(process, "BOOT_S", 3.0)
    monkeypatch.setattr(process, "_GRACE_S", 0.5)
    monkeypatch.setattr(sandbox, "_KILL_TIMEOUT_S", 1.0)


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop(pid: int, stopped: list[int]) -> None:
    os.kill(pid, signal.SIGSTOP)
    stopped.append(pid)


def supervisor_of(name: str) -> int:
    return next(pid for pid, sandbox in local._supervisors() if sandbox.name == name)


@pytest.mark.parametrize("timeout_s", [0.2, None])
async def test_a_command_under_a_stopped_supervisor_is_lost_and_the_sandbox_closes(
    stopped: list[int], timeout_s: float | None
) -> None:
    backend = local.build(local.Options())
    limits = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=10)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(SandboxLostError, match="its supervisor does not answer") as lost:
            async with backend.open("host", limits, workdir="/testbed") as opened:
                stop(supervisor_of(opened.id), stopped)
                await opened.run(["sleep", "600"], timeout_s=timeout_s)

    assert not lost.value.from_inside
    await eventually(lambda: not [one for _, one in local._supervisors() if one.name == opened.id])
    assert opened.id not in {one.name for one in await backend.live()}


async def test_a_command_that_meets_a_dying_sandbox_is_lost_and_has_no_exit_code(
    stopped: list[int],
) -> None:
    """It reaches the supervisor after the kill; an exit code would count as the tests' result."""
    backend = local.build(local.Options())
    async with backend.open("host", LIMITS, workdir="/testbed") as opened:
        supervisor = supervisor_of(opened.id)
        stop(supervisor, stopped)
        running = asyncio.ensure_future(opened.run(["true"]))
        await asyncio.sleep(0)  # the command is sent
        os.kill(opened.pid, signal.SIGKILL)
        await eventually(lambda: is_zombie(opened.pid))
        os.kill(supervisor, signal.SIGCONT)

        with pytest.raises(SandboxLostError, match="killed"):
            await running


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("who", ["supervisor", "init", "spawner"])
async def test_a_sandbox_closes_whichever_of_its_processes_is_stopped(
    stopped: list[int], who: str
) -> None:
    backend = local.build(local.Options())
    async with asyncio.timeout(DEADLINE_S):
        async with backend.open("host", LIMITS, workdir="/testbed") as opened:
            pids = {"supervisor": supervisor_of(opened.id), "init": opened.pid}
            stop(pids.get(who, backend.spawner_pid), stopped)
    if who == "spawner":
        os.kill(stopped.pop(), signal.SIGCONT)

    await eventually(lambda: opened.id not in {one.name for one in local._list_sandboxes(None)})


async def test_after_a_stopped_spawner_another_one_makes_the_next_sandbox(
    stopped: list[int],
) -> None:
    backend = local.build(local.Options())
    async with asyncio.timeout(DEADLINE_S):
        async with backend.open("host", LIMITS, workdir="/testbed") as first:
            was = backend.spawner_pid
            stop(was, stopped)
            with pytest.raises(SandboxError, match=f"the spawner .process {was}. does not answer"):
                async with backend.open("host", LIMITS, workdir="/testbed"):
                    raise AssertionError("nobody made it")
            assert (await first.run(["echo", "on"])).stdout == b"on\n"
            async with backend.open("host", LIMITS, workdir="/testbed") as third:
                assert (await third.run(["echo", "hi"])).stdout == b"hi\n"
                assert backend.spawner_pid != was


@pytest.mark.parametrize(
    "junk", [b"x", b"\xff\xfe", b'"\xed\xa0\x80"', b"[" * 50_000, b'{"number": 1e999', b"\0"]
)
async def test_junk_on_the_control_socket_loses_that_sandbox_alone(junk: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = process.Link(ours, "s", lifetime_s=60, remove=lambda: True)
    async with asyncio.timeout(DEADLINE_S):
        _, answer = await link.request(lambda number: {"listen": number})
        theirs.send(junk)
        with pytest.raises(SandboxLostError, match="its supervisor does not answer"):
            await link.answered(answer)
        await link.close()
    theirs.close()
