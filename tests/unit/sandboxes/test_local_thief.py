"""Nothing inside a sandbox takes anything of the process that starts its commands."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swerl.core.errors import SandboxLostError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import wire
from swerl.sandboxes._local.process import Link

from . import other_user

ROOT = Path(__file__).parents[3]
SECONDS = 60 if os.environ.get("SWERL_NIGHTLY") else 5
SECOND_WALL = r"""
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in 310, 311, 312, 438, 206, 308, 272, 237, 238, 256, 279, 450:
    libc.syscall(number, os.getpid(), 0x10000000, 0, 0, 0, 0)
    print(errno.errorcode[ctypes.get_errno()], end=" ")
"""


@pytest.mark.integration
@pytest.mark.parametrize("user", ["root", "other"])
def test_a_thief_takes_nothing_from_a_command_that_starts(user: str) -> None:
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    python = (sys.executable,) if user == "root" else other_user.command()
    program = Path(__file__).with_name("thief.py")
    paths = [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    done = subprocess.run(
        [*python, "-c", program.read_text(), str(SECONDS)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
        cwd="/",
        env={**os.environ, "HOME": "/nonexistent", "PYTHONPATH": ":".join(paths)},
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["commands"] > 5
    assert (report["taken"], report["wrong"]) == ([], [])


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are of x86_64")
@pytest.mark.parametrize("user", ["agent", "root"])
async def test_calls_that_reach_into_other_processes_are_refused(
    backend: local.LocalBackend, user: str
) -> None:
    """The second wall, for a process that should be dumpable by mistake."""
    async with backend.open("host", Limits(memory_mib=128), workdir="/w") as sandbox:
        done = await sandbox.run(["python3", "-c", SECOND_WALL], user=user)
    assert done.text.split() == [*["ENOSYS"] * 3, "EPERM", "ENOSYS", *["EPERM"] * 7]


async def test_a_debugger_works_on_its_own_processes(backend: local.LocalBackend) -> None:
    trace = "import ctypes, os, signal; libc = ctypes.CDLL(None)\nif not (pid := os.fork()):\n"
    trace += " libc.ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); os._exit(7)\n"
    trace += "assert os.WIFSTOPPED(os.waitpid(pid, 0)[1]); libc.ptrace(7, pid, 0, 0)\n"
    trace += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    async with backend.open("host", Limits(memory_mib=128), workdir="/w") as sandbox:
        assert (await sandbox.run(["python3", "-c", trace])).text == "7\n"


async def test_the_supervisor_is_not_dumpable_and_holds_no_folder_of_the_host(
    backend: local.LocalBackend,
) -> None:
    async with backend.open("host", Limits(memory_mib=128), workdir="/w") as sandbox:
        await sandbox.run(["true"])
        supervisor = int(
            Path(f"/proc/{sandbox.pid}/stat").read_text().rpartition(")")[2].split()[1]
        )
        for pid in (sandbox.pid, supervisor):
            assert Path(f"/proc/{pid}/environ").stat().st_uid == 0
        if os.geteuid() == 0:
            assert not list(Path(f"/proc/{sandbox.pid}/fd").iterdir())
            links = [str(path.readlink()) for path in Path(f"/proc/{supervisor}/fd").iterdir()]
            held = [link for link in links if link.startswith("/") and link != "/dev/null"]
            assert sorted(held) == ["/proc", f"/proc/{supervisor}/oom_score_adj"]


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def forged(body: bytes, fds: list[int]) -> wire.Packet | None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [body], fds)
        return wire.receive(ours)


def test_a_forged_message_is_refused_and_nothing_waits_for_it() -> None:
    pipe = os.pipe()
    unsealed, event = os.memfd_create("message"), os.eventfd(0)
    os.write(unsealed, b"{}")
    try:
        before = count_descriptors()
        for fds in ([pipe[0]], [unsealed], [event], []):
            with pytest.raises(ValueError):
                forged(b"\0", fds)
        for body in (b"[]", b"1", b"{", b"[" * 50_000, b"\xff"):
            with pytest.raises(ValueError):
                forged(body, [event])
        assert count_descriptors() == before
    finally:
        for fd in (*pipe, unsealed, event):
            os.close(fd)


def test_a_large_message_is_sealed_and_arrives() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        wire.send(theirs, {"text": "x" * 100_000})
        packet = wire.receive(ours)
    assert packet and packet.body == {"text": "x" * 100_000}


def test_the_last_message_arrives_although_a_request_is_unread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            wire.send(ours, {"number": 1})
            wire.send(theirs, {"lost": "its lifetime is over"})
        packet = wire.receive(ours)
        assert packet and packet.body == {"lost": "its lifetime is over"}
        assert wire.receive(ours) is None


@pytest.mark.parametrize("answer", [{}, {"exit_code": "0"}, {"exit_code": True}, {"port": 1}])
async def test_an_answer_without_its_number_ends_the_sandbox(answer: dict[str, object]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(ours, "a", lifetime_s=60, remove=lambda: True)
    number, waiting = await link.request(lambda number: {"number": number}, result="exit_code")
    with theirs:
        wire.send(theirs, {"number": number, **answer})  # type: ignore[dict-item]
        async with asyncio.timeout(10):
            with pytest.raises(SandboxLostError):
                await link.answered(waiting)
    await link.close()
