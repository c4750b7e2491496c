"""The backends that the conformance suite judges, and a sandbox of each."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

from swerl.errors import SandboxUnavailableError
from swerl.interfaces import Limits, Sandbox, SandboxBackend
from swerl.sandboxes import local

WORKDIR = "/testbed"
LIMITS = Limits(memory_mib=512, num_processes=64, disk_mib=256, lifetime_s=120)
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
