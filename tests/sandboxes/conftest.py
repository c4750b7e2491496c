"""The backends that the conformance suite judges, and a sandbox of each."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

from swerl.errors import SandboxUnavailableError
from swerl.interfaces import Sandbox
from swerl.sandboxes import docker, local

from .helpers import OUTPUT_CAP_MIB, Target

NO_QUOTA = "overlay2 limits a container's disk on xfs only; a single file is limited everywhere"
TARGETS = ("local/bwrap", "local/unshare", "docker")


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """One backend, and an image for it that holds sh, Python and git."""
    name, _, isolator = request.param.partition("/")
    if name == "docker":
        image = request.getfixturevalue("docker_image")
        base_url = request.getfixturevalue("dockerd")
        options = docker.Options(base_url=base_url, output_cap_mib=OUTPUT_CAP_MIB)
        return Target(docker.build(options), image, {"disk quota": NO_QUOTA})
    if isolator == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    return Target(
        local.build(local.Options(isolator=isolator, output_cap_mib=OUTPUT_CAP_MIB)), "host"
    )


@pytest.fixture
async def sandbox(target: Target) -> AsyncIterator[Sandbox]:
    try:
        async with target.open() as opened:
            yield opened
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")


@pytest.fixture
def host_secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a host file that no sandbox may reach."""
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text("host secret")
    path.chmod(0o644)
    return str(path)
