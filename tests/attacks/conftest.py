"""The sandboxes that the attacks meet."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swerl.core.errors import SandboxUnavailableError
from swerl.sandboxes import local

from .box import LIMITS, Box

WORKDIR = "/testbed"


@pytest.fixture(params=["bwrap", "unshare"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    """A sandbox of `local`, by each isolator."""
    isolator: Any = request.param
    if isolator == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    backend = local.build(local.Options(isolator=isolator))
    try:
        async with backend.open("host", LIMITS, workdir=WORKDIR) as sandbox:
            yield Box(sandbox, backend, WORKDIR)
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")
