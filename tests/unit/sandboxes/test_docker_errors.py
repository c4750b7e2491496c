"""Every failure around the `docker` backend is one clear error and leaves nothing."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from collections.abc import Iterator

import pytest

from swerl.core.errors import (
    ImageError,
    SandboxError,
    SandboxLostError,
    SandboxUnavailableError,
    SwerlError,
)
from swerl.core.sandbox import new_name
from swerl.sandboxes import docker

from ...services import dockerd as services_dockerd
from ...services.daemon import CannotRunError, Daemon
from ...services.image import BaseImage
from .helpers import LIMITS, WORKDIR, sh, until


@pytest.fixture
def backend(dockerd: str) -> docker.DockerBackend:
    return docker.build(docker.Options(base_url=dockerd))


async def refuse(
    backend: docker.DockerBackend, image: str, kind: type[SwerlError], **options: object
) -> SwerlError:
    """Open a sandbox that cannot be had; return the error, after a look that nothing is left."""
    name = new_name()
    with pytest.raises(kind) as raised:
        async with backend.open(image, LIMITS, workdir=WORKDIR, name=name, **options):  # type: ignore[arg-type]
            pass
    assert name not in {live.name for live in await backend.live()}
    assert raised.value.hint, raised.value
    return raised.value


async def test_an_image_that_the_registry_lacks(
    backend: docker.DockerBackend, registry: str
) -> None:
    error = await refuse(backend, f"{registry}/nobody/nothing:1", ImageError)
    assert "nobody/nothing" in str(error)
    assert "check the name" in error.hint


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
