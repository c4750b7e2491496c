"""An E2B-compatible server, a proxy that breaks it on demand, and the backend that uses both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from swerl.core.contracts import Sandbox
from swerl.sandboxes import e2b, local

from ..e2b_faults import Faults
from ..e2b_server.helpers import KEY, Service, serving
from ..helpers import LIMITS, WORKDIR


def backend(url: str, **settings: object) -> e2b.E2BBackend:
    """Build a backend for the server at `url`."""
    options = {"api_url": url, "sandbox_url": url, "creates_per_s": 1000, **settings}
    return e2b.build(e2b.Options(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(local.build(local.Options()), limits=LIMITS, workdir=WORKDIR) as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(e2b.KEY, KEY)
    monkeypatch.setattr(e2b, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
async def faults(service: Service) -> AsyncIterator[Faults]:
    async with Faults(service.url) as proxy:
        yield proxy


@pytest.fixture
async def sandbox(faults: Faults) -> AsyncIterator[Sandbox]:
    async with backend(faults.url).open("base", LIMITS, workdir=WORKDIR) as opened:
        yield opened
