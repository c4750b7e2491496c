"""The `local` backend leaves nothing behind, at whatever moment its controller is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swerl.sandboxes import local
from swerl.sandboxes._local import limits
from swerl.sandboxes._local.supervisor import _FIRST_PORT

from . import other_user

ROUNDS = 50

# It adopts whatever its controllers leave, so that having no child at the end means: all is gone.
KILLER = """
import asyncio, ctypes, os, random, signal, socket, sys, time
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

class Listener:
    async def attach(self, sock):
        self.sock = sock

async def churn(backend):
    while True:
        limits = Limits(memory_mib=128, num_processes=16, disk_mib=16, lifetime_s=60)
        async with backend.open("host", limits, workdir="/testbed") as sandbox:
            await sandbox.expose(Listener())
            await sandbox.run(["sh", "-c", "setsid sleep 60 & echo > f"])
            async with sandbox.start(["cat"]):
                pass

async def control():
    backend = local.build(local.Options())
    await asyncio.gather(churn(backend), churn(backend))

def spawner_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()][:1]

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
for number in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        asyncio.run(control())
    time.sleep(random.uniform(0, 0.15))
    victims = spawner_of(pid) if number % 4 > 1 else []
    for victim in [pid, *victims]:
        os.kill(victim, signal.SIGKILL)
    print(pid, flush=True)
give_up = time.monotonic() + 20
while time.monotonic() < give_up:
    try:
        if not os.waitpid(-1, os.WNOHANG)[0]:
            time.sleep(0.01)
    except ChildProcessError:
        sys.exit(0)
left = spawner_of(os.getpid())
print("left", [open(f"/proc/{pid}/cmdline").read() for pid in left], file=sys.stderr)
sys.exit(1)
"""


def sandbox_mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith("/sys")]


def listeners() -> set[int]:
    """Return the ports of this network namespace on which sandboxes would be exposed."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(words[1].partition(":")[2], 16) for words in lines if words[3] == "0A"}
    return ports & set(range(_FIRST_PORT, _FIRST_PORT + 100))


@pytest.mark.parametrize("user", ["self", "unprivileged"])
async def test_fifty_kills_leave_nothing(user: str) -> None:
    python = [sys.executable] if user == "self" else other_user.command()
    mounts, ports = sandbox_mounts(), listeners()
    done = subprocess.run(  # noqa: ASYNC221  nothing else runs here
        [*python, "-c", KILLER, str(ROUNDS)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    controllers = done.stdout.split()
    assert len(controllers) == ROUNDS

    backend = local.build(local.Options())
    for one in await backend.live():
        if one.name.split("-")[1] in controllers:
            await backend.remove(one.name)
    left = [path.name for path in limits.leftovers(limits.find())]
    assert not [name for name in left if name.split("-")[1] in controllers]
    assert sandbox_mounts() == mounts
    assert listeners() <= ports  # another worker's may have gone meanwhile
