"""A server over the local backend, and the SDK's sandbox on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b import Sandbox

from swerl.sandboxes import local

from .helpers import Service, serving


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """A server for all tests that do not stop it."""
    with serving(local.build(local.Options())) as running:
        yield running


@pytest.fixture
def sandbox(service: Service) -> Iterator[Sandbox]:
    """A sandbox of the image `host`, through the SDK."""
    made = Sandbox.create(timeout=120, **service.sdk)
    yield made
    made.kill()
