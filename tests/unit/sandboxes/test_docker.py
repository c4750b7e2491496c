"""The `docker` backend beyond conformance: its end, limits and network, attacks, and failures.

Every failure around it is one clear error and leaves nothing.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from swerl.core.errors import ImageError, SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Limits, new_name
from swerl.sandboxes import _machine, docker

from ...services import dockerd as services_dockerd
from ...services.daemon import CannotRunError, Daemon
from ...services.image import BaseImage
from .helpers import GREETED, LIMITS, WORKDIR, Echo, processes, refuse, sh, until


@pytest.fixture
def backend(dockerd: str) -> docker.DockerBackend:
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


async def test_the_daemon_is_that_of_the_current_context(
    dockerd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from docker import ContextAPI

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "")
    ContextAPI.create_context("colima", host=dockerd)
    ContextAPI.set_current_context("colima")
    await docker.build(docker.Options()).live()
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
    with pytest.raises(SandboxUnavailableError, match="no/such"):
        await docker.build(docker.Options()).live()


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


async def test_an_image_that_the_registry_lacks(
    backend: docker.DockerBackend, registry: str
) -> None:
    error = await refuse(backend, f"{registry}/nobody/nothing:1", ImageError)
    assert "nobody/nothing" in str(error)
    assert "check the name" in error.hint


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("Credentials store error: StoreError('docker-credential-x not installed')", "helper"),
        ("pull access denied for agents/runtime, repository does not exist", "docker login"),
    ],
)
async def test_the_hint_of_a_failed_pull(reason: str, hint: str) -> None:
    from docker.errors import DockerException

    daemon = docker.Daemon()
    daemon._client = Mock(pull=Mock(side_effect=DockerException(reason)))
    with pytest.raises(ImageError, match="cannot pull agents/runtime") as raised:
        await docker.containers.pull(daemon, "agents/runtime:django-14290")
    assert hint in raised.value.hint


async def test_an_absent_image_is_pulled(backend: docker.DockerBackend, pushed_image: str) -> None:
    async with backend.open(pushed_image, LIMITS, workdir=WORKDIR) as sandbox:
        assert await sh(sandbox, "echo pulled") == "pulled\n"


async def test_gvisor_cannot_end_commands(dockerd: str, docker_image: str) -> None:
    if not shutil.which("runsc"):
        pytest.skip("runsc (gVisor) is not installed")
    backend = docker.build(docker.Options(base_url=dockerd, runtime="runsc"))
    error = await refuse(backend, docker_image, SandboxError)
    assert "/proc/PID/limits" in error.hint


@pytest.fixture
def image_without_shell(dockerd: str) -> Iterator[str]:
    from docker import DockerClient

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    client, name = DockerClient(base_url=dockerd), "swerl-test/no-shell"
    client.api.import_image_from_data(buffer.getvalue(), repository=name, tag="1")
    yield f"{name}:1"
    client.images.remove(f"{name}:1")
    client.close()


async def test_an_image_without_a_shell(
    backend: docker.DockerBackend, image_without_shell: str
) -> None:
    error = await refuse(backend, image_without_shell, SandboxError)
    assert "/bin/sh" in error.hint


@pytest.mark.parametrize("url", ["unix:///no/such.sock", "tcp://127.0.0.1:1", "nonsense://x"])
async def test_no_daemon(url: str) -> None:
    backend = docker.build(docker.Options(base_url=url))
    for look in (backend.live(), backend.remove("x")):
        with pytest.raises(SandboxUnavailableError) as raised:
            await look
        assert raised.value.hint


@pytest.fixture
def own_dockerd(base_image: BaseImage) -> Iterator[Daemon]:
    """A daemon that a test may kill, with the image loaded."""
    from docker import DockerClient

    try:
        daemon = services_dockerd.start()
    except CannotRunError as error:
        pytest.skip(str(error))
    client = DockerClient(base_url=daemon.address)
    client.images.load(base_image.archive.read_bytes())
    client.close()
    yield daemon
    daemon.stop()


async def test_a_daemon_that_is_killed_during_a_command(
    own_dockerd: Daemon, base_image: BaseImage
) -> None:
    backend = docker.build(docker.Options(base_url=own_dockerd.address))
    with pytest.raises(SandboxError) as closing:
        async with backend.open(base_image.name, LIMITS, workdir=WORKDIR) as sandbox:
            running = asyncio.ensure_future(sandbox.run(["sleep", "600"]))
            await until(sandbox, "sleep 600", 1)
            own_dockerd.process.kill()
            with pytest.raises(SandboxLostError, match="daemon no longer answers") as raised:
                await running
            assert raised.value.hint
            with pytest.raises(SandboxLostError):
                await sandbox.read("/etc/passwd")
    assert closing.value.hint
