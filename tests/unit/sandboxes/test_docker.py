"""The `docker` backend beyond conformance: its end, its limits, its network."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from swerl.core.errors import SandboxLostError
from swerl.core.sandbox import Limits, new_name
from swerl.sandboxes import docker

from .helpers import GREETED, LIMITS, WORKDIR, Echo, sh


@pytest.fixture
def backend(dockerd: str, docker_image: str) -> docker.DockerBackend:
    return docker.build(docker.Options(base_url=dockerd))


async def names(backend: docker.DockerBackend) -> set[str]:
    return {live.name for live in await backend.live()}


async def gone(backend: docker.DockerBackend, name: str) -> None:
    """Wait until the daemon has no container of this name."""
    async with asyncio.timeout(15):
        while name in await names(backend):  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("runs", [True, False])
async def test_a_code_of_a_command_counts_only_if_its_container_runs(runs: bool) -> None:
    """A daemon that restarts may report the end of a command before that of its container."""
    client, daemon = Mock(), Mock(limits=set())
    client.inspect_container.return_value = {"State": {"Running": runs}}
    client.exec_inspect.return_value = {"Running": False, "ExitCode": 137}
    daemon.call = AsyncMock(side_effect=lambda work: work(client))
    sandbox = docker.DockerSandbox(daemon, Mock(limits=LIMITS), "container")
    ended = sandbox._explain_cut(lambda _: sandbox._wait_for_exit("exec"), b"")
    if runs:
        assert await ended == 137
    else:
        with pytest.raises(SandboxLostError, match="killed"):
            await ended


CONTROLLER = """
import asyncio, sys
from swerl.core.sandbox import Limits
from swerl.sandboxes import docker

async def main(base_url, image, name):
    backend = docker.build(docker.Options(base_url=base_url))
    async with backend.open(image, Limits(lifetime_s=60), workdir="/testbed", name=name) as box:
        await box.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"])
        print("up", flush=True)
        await box.run(["sleep", "600"])

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_controller_leaves_nothing(
    backend: docker.DockerBackend, dockerd: str, docker_image: str
) -> None:
    name = new_name()
    child = subprocess.Popen(  # noqa: ASYNC220  it is another controller
        [sys.executable, "-c", CONTROLLER, dockerd, docker_image, name],
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert child.stdout
    assert child.stdout.readline() == b"up\n"
    assert name in await names(backend)
    child.kill()
    child.communicate()
    await gone(backend, name)


async def test_a_relay_is_used_if_the_network_cannot_be_entered(
    backend: docker.DockerBackend, docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "_runs_here", lambda *_: False)
    async with backend.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        listener = Echo(b"by stream")
        url = await sandbox.expose(listener)
        done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
        assert done.stdout == b"by stream\n", done
        listener.server.close()


async def test_the_clients_proxy_settings_stay_outside(
    dockerd: str, docker_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = '{"proxies": {"default": {"httpProxy": "http://user:password@proxy.invalid"}}}'
    (tmp_path / "config.json").write_text(proxies)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    backend = docker.build(docker.Options(base_url=dockerd))
    async with backend.open(docker_image, LIMITS, workdir=WORKDIR) as sandbox:
        assert "password" not in await sh(sandbox, "env; cat /proc/1/environ")


async def test_the_container_has_the_limits(
    backend: docker.DockerBackend, docker_image: str
) -> None:
    limits = Limits(memory_mib=300, num_processes=40, num_cpus=0.5, disk_mib=64, lifetime_s=60)
    async with backend.open(docker_image, limits, workdir=WORKDIR) as sandbox:
        assert {"memory", "pids", "cpu"} <= sandbox.limits
        assert int(await sh(sandbox, "ulimit -f")) == 64 << 11
        grow = "x = bytearray(400 << 20)"
        assert (await sandbox.run(["python3", "-c", grow], timeout_s=20)).exit_code == 137


async def test_files_that_together_exceed_the_disk_limit_end_the_sandbox(
    backend: docker.DockerBackend, docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "_MEASURE_S", 0.05)
    limits = Limits(memory_mib=256, num_processes=32, disk_mib=4, lifetime_s=60)
    async with backend.open(docker_image, limits, workdir=WORKDIR) as sandbox:
        fill = "for n in 1 2 3; do head -c 3000000 /dev/zero > f$n; done; sleep 60"
        with pytest.raises(SandboxLostError, match="disk_mib"):
            await sandbox.run(["sh", "-c", fill], timeout_s=20)
