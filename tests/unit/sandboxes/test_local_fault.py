"""Whose fault the loss of a sandbox was is what the kernel counted, not what anybody says."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from swerl.core.errors import SandboxFileError, SandboxLostError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import limits, wire
from swerl.sandboxes._local.process import Link

LIMITS = Limits(memory_mib=128, disk_mib=32, num_processes=64)
HOG = """
import os, sys
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")
except OSError as error:
    print(error.strerror, flush=True)
fd = os.memfd_create("hog")
while True:
    os.write(fd, bytes(1 << 20))
"""
LEASE = """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open("/work/tool", os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
time.sleep(60)
"""


def supervisor_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_memory_that_no_process_has_mapped_is_the_sandboxs_own_fault(
    backend: local.LocalBackend,
) -> None:
    async with backend.open("host", LIMITS, workdir="/work") as sandbox:
        if "memory" not in sandbox.limits:
            pytest.skip("this user cannot create a memory cgroup")
        try:
            done = await sandbox.run(["python3", "-c", HOG], timeout_s=60)
            assert done.text == "Read-only file system\n" and done.exit_code == 137
        except SandboxLostError as error:
            assert error.from_inside


@pytest.mark.parametrize("ran_out", [False, True])
async def test_a_supervisor_that_is_killed_is_judged_by_the_counters(
    backend: local.LocalBackend, ran_out: bool
) -> None:
    async with backend.open("host", LIMITS, workdir="/work") as sandbox:
        if ran_out:
            if "memory" not in sandbox.limits:
                pytest.skip("this user cannot create a memory cgroup")
            await sandbox.run(["python3", "-c", HOG], timeout_s=60)
        os.kill(supervisor_of(sandbox.pid), signal.SIGKILL)
        with pytest.raises(SandboxLostError) as raised:
            await sandbox.run(["sleep", "5"])
        assert raised.value.from_inside == ran_out


async def test_a_message_decides_nothing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    verdict, written = os.pipe()
    link = Link(ours, "a", lifetime_s=60, remove=lambda: True, verdict=verdict)
    _, waiting = await link.request(lambda number: {"number": number})
    with theirs:
        wire.receive(theirs)
        wire.send(theirs, {"lost": "it says", "from_inside": True})
    os.close(written)
    with pytest.raises(SandboxLostError, match="it says") as raised:
        await link.answered(waiting)
    assert not raised.value.from_inside
    await link.close()


async def test_a_lease_on_a_program_delays_its_command_alone(backend: local.LocalBackend) -> None:
    async with backend.open("host", LIMITS, workdir="/work") as sandbox:
        await sandbox.write("/work/tool", b"#!/bin/sh\necho ran\n")
        await sandbox.run(["chmod", "755", "/work/tool"], user="root")
        await sandbox.run(["chown", "agent", "/work/tool"], user="root")
        async with sandbox.start(["python3", "-c", LEASE]) as holder:
            async for chunk in holder.output():
                assert chunk.data == b"leased\n"
                break
            started = time.monotonic()
            done = await sandbox.run(["/work/tool"], timeout_s=1)
            assert done.timed_out and time.monotonic() - started < 15
            assert (await sandbox.run(["echo", "alive"], timeout_s=10)).text == "alive\n"


def test_the_counters_of_both_versions_are_read(tmp_path: Path) -> None:
    group, groups = tmp_path / "a", {"memory": tmp_path}
    group.mkdir()
    assert limits.memory_counts({}, "a") == limits.memory_counts(groups, "a")
    (group / "memory.failcnt").write_text("3\n")
    (group / "memory.oom_control").write_text("under_oom 0\n")  # an old kernel
    assert limits.memory_counts(groups, "a") == limits.MemoryCounts()
    (group / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert limits.memory_counts(groups, "a") == limits.MemoryCounts(kills=2, hits=3)
    (group / "memory.events").write_text("low 0\nmax 9\noom 4\noom_kill 5\n")
    assert limits.memory_counts(groups, "a") == limits.MemoryCounts(kills=5, hits=4)


@pytest.mark.parametrize("path", ["/proc/kallsyms", "/proc/1/maps", "/proc/self/environ"])
async def test_the_editor_refuses_files_of_the_kernel(
    backend: local.LocalBackend, path: str
) -> None:
    async with backend.open("host", LIMITS, workdir="/work") as sandbox:
        with pytest.raises((SandboxFileError, FileNotFoundError)):
            await sandbox.read(path)
        with pytest.raises(SandboxFileError):
            await sandbox.write("/proc/1/oom_score_adj", b"0")
        await sandbox.run(["ln", "-s", "/proc/version", "link"])
        with pytest.raises(SandboxFileError, match="a file of the kernel"):
            await sandbox.read("/work/link")


TERMINALS = """
import os
fds = []
try:
    while True:
        fds.append(os.openpty())
except OSError:
    print(len(fds))
"""


SOCKETS = """
import socket
total, kept = 0, []
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(400)
for _ in range(100):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    one.connect(listener.getsockname())
    kept += [one, listener.accept()[0]]
    one.setblocking(False)
    try:
        while True:
            total += one.send(bytes(1 << 16))
    except OSError:
        pass
print(total >> 20)
"""


async def test_terminals_and_sockets_of_one_sandbox_are_bounded(
    backend: local.LocalBackend,
) -> None:
    async with backend.open("host", LIMITS, workdir="/work") as sandbox:
        assert 8 <= int((await sandbox.run(["python3", "-c", TERMINALS])).text) <= 64
        if "memory" in sandbox.limits:
            done = await sandbox.run(["python3", "-c", SOCKETS], timeout_s=60)
            assert done.exit_code == 137 or int(done.text) <= 128
