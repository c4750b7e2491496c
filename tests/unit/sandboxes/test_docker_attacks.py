"""Attacks of commands in a container on their own end and on the signaller."""

from __future__ import annotations

import asyncio
import time

import pytest

from swerl.core.errors import SandboxLostError
from swerl.sandboxes import _machine, docker

from .helpers import LIMITS, WORKDIR, processes, sh, until


@pytest.fixture
def backend(dockerd: str, docker_image: str) -> docker.DockerBackend:
    return docker.build(docker.Options(base_url=dockerd))


async def test_an_agent_that_kills_every_process_ends_only_its_command(
    backend: docker.DockerBackend, docker_image: str
) -> None:
    async with backend.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        await sandbox.run(["sh", "-c", "kill -9 -1"], timeout_s=10)
        assert await sh(sandbox, "echo still here") == "still here\n"
        done = await sandbox.run(["sleep", "60"], timeout_s=0.3)
        assert done.timed_out


EVADER = """
import os, resource, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        limit = resource.getrlimit(10)[0]
        wanted = {"lower": limit - 5, "higher": limit + 1, "none": -1}[sys.argv[1]]
        try:
            resource.setrlimit(10, (wanted, wanted))
        except (OSError, ValueError):
            pass
        os.execvp("sleep", ["sleep", sys.argv[2]])
    os._exit(0)
os.wait()
os.execvp("sleep", ["sleep", sys.argv[2]])
"""


@pytest.mark.parametrize("mark", ["lower", "higher", "none"])
async def test_a_process_cannot_remove_its_mark(
    backend: docker.DockerBackend, docker_image: str, mark: str
) -> None:
    token = f"{time.time():.6f}"
    async with backend.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        await sh(sandbox, "sleep 600 >/dev/null 2>&1 &")
        command = ["python3", "-c", EVADER, mark, token]
        run = asyncio.ensure_future(sandbox.run(command, timeout_s=1.0))
        await until(sandbox, f"sleep {token}", 2)
        assert (await run).timed_out
        assert await processes(sandbox, f"sleep {token}") == 0
        assert await processes(sandbox, "sleep 600") == 1


FORGERY = r"""
import os, sys, time
token = open(f"/proc/{os.getppid()}/cmdline", "rb").read().split(b"\0")[4]
for word in (b"end", b"000"):
    for fd in (1, 2):
        os.write(fd, b"\0" + token + word)
time.sleep(0.1)
os.write(1, b"after")
sys.exit(4)
"""


async def test_a_command_cannot_forge_its_end(
    backend: docker.DockerBackend, docker_image: str
) -> None:
    async with backend.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        done = await sandbox.run(["python3", "-c", FORGERY], timeout_s=10)
        assert (done.exit_code, done.timed_out) == (4, False)
        assert done.stdout.endswith(b"after")
        stuck = f"{FORGERY.rpartition('sys')[0]}time.sleep(600)"
        assert (await sandbox.run(["python3", "-c", stuck], timeout_s=0.5)).timed_out


BLIND = """
for each in /proc/[0-9]*; do
    case $(tr '\\0' ' ' <$each/cmdline) in *swerl-signaller*) kill -STOP ${each#/proc/} ;; esac
done 2>/dev/null
sleep 600
"""


async def test_a_command_that_stops_the_signaller_is_still_a_timeout(
    backend: docker.DockerBackend, docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_machine, "_KILL_TIMEOUT_S", 0.5)
    async with backend.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        done = await sandbox.run(["sh", "-c", BLIND], timeout_s=0.5)
        assert (done.exit_code, done.timed_out) == (124, True)
        with pytest.raises(SandboxLostError, match="did not die"):
            await sandbox.run(["true"])
