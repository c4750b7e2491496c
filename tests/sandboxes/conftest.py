"""The backends that the conformance suite judges, and a sandbox of each."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

from swerl.errors import SandboxUnavailableError
from swerl.interfaces import Sandbox, SandboxBackend
from swerl.sandboxes import local

from .helpers import LIMITS, WORKDIR

BACKENDS = ("local/bwrap", "local/unshare")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    isolator = request.param.partition("/")[2]
    if isolator == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    return local.build(local.Options(isolator=isolator, output_cap_mib=0.5))


@pytest.fixture
async def sandbox(backend: SandboxBackend) -> AsyncIterator[Sandbox]:
    try:
        async with backend.open("host", LIMITS, workdir=WORKDIR) as opened:
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
