"""The sandboxes that the attacks meet."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from swerl.core.errors import SandboxUnavailableError
from swerl.sandboxes import local

from .box import LIMITS, Box

WORKDIR = "/testbed"


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    """A sandbox of `local`."""
    backend = local.build(local.Options())
    try:
        async with backend.open("host", LIMITS, workdir=WORKDIR) as sandbox:
            yield Box(sandbox, backend, WORKDIR)
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")
