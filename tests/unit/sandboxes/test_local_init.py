"""The init process of a `local` sandbox: nothing inside can end it, and it reaps orphans."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import stage
from swerl.sandboxes._local.sandbox import LocalSandbox

from .helpers import sh

LIMITS = Limits(memory_mib=256, num_processes=64, disk_mib=64, lifetime_s=60)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    backend = local.build(local.Options())
    async with backend.open("host", LIMITS, workdir="/testbed") as opened:
        yield opened


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_killing_every_process_ends_only_the_commands(sandbox: Sandbox, user: str) -> None:
    async with sandbox.start(["sleep", "60"]) as other:
        await sandbox.run(["bash", "-c", "kill -9 -1"], user=user)
        assert await other.wait() == 137
    await sandbox.write("/testbed/f", b"kept")
    assert await sh(sandbox, "cat f") == "kept"


async def test_locking_the_root_folder_ends_only_the_commands(sandbox: Sandbox) -> None:
    """Their files are out of reach for their own user then; that is no fault of the sandbox."""
    locked = await sandbox.run(["bash", "-c", "chmod 0 /; while :; do :; done"], timeout_s=1)
    assert locked.timed_out
    refused = await sandbox.run(["bash", "-c", "true"])
    assert refused.exit_code == 126
    assert "Permission denied" in refused.text


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_no_signal_ends_the_init_process(sandbox: Sandbox, user: str) -> None:
    script = "for n in $(seq 64); do kill -$n 1; done; for n in $(seq 64); do kill -$n 1; done"
    await sandbox.run(["bash", "-c", script], user=user)
    script = "ls /proc | grep '^[0-9]' | xargs kill -9"
    await sandbox.run(["sh", "-c", script], user=user)
    assert await sh(sandbox, "echo still here") == "still here\n"


async def test_no_limit_can_be_set_on_the_init_process(sandbox: Sandbox) -> None:
    script = "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (1, 1))"
    done = await sandbox.run(["python3", "-c", script])
    assert b"PermissionError" in done.stderr
    script = "import resource as r; print(r.prlimit(0, r.RLIMIT_NOFILE, (9, 9)))"
    assert (await sandbox.run(["python3", "-c", script])).exit_code == 0


async def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    await sh(sandbox, "for n in $(seq 30); do (sleep 0.01 &) ; done; sleep 0.05")
    states = await sh(sandbox, "cat /proc/[0-9]*/stat | cut -d' ' -f3 | grep -c Z || true")
    assert states == "0\n"


async def test_its_memory_and_root_are_inaccessible_and_its_name_reveals_nothing(
    sandbox: Sandbox,
) -> None:
    for path in ("/proc/1/root/", "/proc/1/environ", "/proc/1/mem", "/proc/1/fd/"):
        done = await sandbox.run(["sh", "-c", f"ls {path} && head -c 1 {path}"], user="root")
        assert done.exit_code != 0
    assert (await sh(sandbox, "tr '\\0' ' ' < /proc/1/cmdline")).split() == ["sandbox"]


async def test_a_command_has_its_three_streams_and_nothing_else_open(sandbox: Sandbox) -> None:
    script = "import os; print(sorted(os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in "
    script += "os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')))"
    async with sandbox.start(["cat"]), sandbox.start(["cat"]):
        await sandbox.expose(_Listener())
        for user in ("agent", "root"):
            assert await sh(sandbox, f'python3 -c "{script}"', user=user) == (
                "['/dev/null', 'pipe', 'pipe']\n"
            )


class _Listener:
    async def attach(self, sock: socket.socket) -> None:
        self.sock = sock


CACHED_PAGES = """
import ctypes, os, platform, sys
fd = os.open(sys.executable, os.O_RDONLY)
print(os.preadv(fd, [bytearray(4)], 0))
try:
    print("read", os.preadv(fd, [bytearray(4)], 0, os.RWF_NOWAIT))
except OSError:
    print("hidden")
libc = ctypes.CDLL(None, use_errno=True)
number, buffer = (27 if platform.machine() == "x86_64" else 232), bytes(4096)
print(libc.syscall(number, ctypes.c_long(id(buffer) & ~4095), ctypes.c_long(4096), bytes(9)))
"""


async def test_no_call_shows_which_pages_of_a_file_are_in_memory(sandbox: Sandbox) -> None:
    """Code under test could leave notes for a later sandbox in the cache of a shared file."""
    assert isinstance(sandbox, LocalSandbox)
    if "syscalls" not in sandbox.limits:
        pytest.skip("no system call filter on this processor")
    done = await sandbox.run(["python3", "-c", CACHED_PAGES])
    assert done.stdout.split() == [b"4", b"hidden", b"-1"], done.text


NO_GROUPS = """
import asyncio
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

BOMB = "import os\\nwhile True:\\n try: os.fork()\\n except OSError: pass"

async def main():
    limits = Limits(memory_mib=256, num_processes=24, disk_mib=32, lifetime_s=60)
    backend = local.build(local.Options())
    async with backend.open("host", limits, workdir="/testbed") as sandbox:
        assert not sandbox.limits & {"memory", "pids", "cpu"}, sandbox.limits
        await sandbox.run(["python3", "-c", BOMB], timeout_s=0.3)
        done = await sandbox.run(["python3", "-c", "x = bytearray(1 << 30)"])
        print(done.exit_code, (await sandbox.run(["echo", "still here"])).text, end="")

asyncio.run(main())
"""


def test_root_without_cgroups_still_has_limits() -> None:
    if not stage.can_change_user():
        pytest.skip("needs root")
    hidden = 'umount -R /sys/fs/cgroup; exec "$0" -c "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hidden, sys.executable, NO_GROUPS],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1 still here\n", done


async def test_a_parent_that_waits_in_the_kernel_does_not_delay_a_kill(sandbox: Sandbox) -> None:
    """Such a parent cannot be stopped; its child, held up before its program, never lets it go."""
    script = "import os; os.mkfifo('p'); print('up', flush=True); "
    script += "os.posix_spawn('/bin/true', ['true'], {}, file_actions=["
    script += "(os.POSIX_SPAWN_OPEN, 0, 'p', os.O_RDONLY, 0)])"
    async with asyncio.timeout(4):  # less than a kill waits for processes that do not stop
        async with sandbox.start(["python3", "-c", script]) as process:
            async for _ in process.output():
                break
            await until_waiting(sandbox)


async def until_waiting(sandbox: Sandbox) -> None:
    script = "until grep -q '^State:.D' /proc/[0-9]*/status; do sleep 0.01; done"
    await sh(sandbox, script)


HOARD = """
import ctypes, mmap
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
total = 0
for _ in range(1000):
    name = libc.shmget(0, 1 << 20, 0o1600)
    place = libc.shmat(name, None, 0) if name >= 0 else -1
    if name < 0 or place in (None, -1, 2**64 - 1):
        break
    ctypes.memset(place, 1, 1 << 20)
    total += 1
queues = sum(libc.msgget(0, 0o1600) >= 0 for _ in range(1000))
print(total, queues)
"""


async def test_shared_memory_leaves_memory_for_commands(sandbox: Sandbox) -> None:
    """It outlives who made it, so a sandbox full of it could start no command any more."""
    done = await sandbox.run(["python3", "-c", HOARD], timeout_s=20)
    segments, queues = map(int, done.stdout.split())
    if segments > LIMITS.memory_mib // 2:
        pytest.skip("this kernel lets only the host's root bound shared memory")
    assert segments <= LIMITS.memory_mib // 16
    assert queues <= 64
    assert await sh(sandbox, "echo still here") == "still here\n"
