"""A server over the local backend, and the SDK's sandbox on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swerl.sandboxes import local

from .helpers import Service, serving

e2b = pytest.importorskip("e2b", reason="the extra e2b is not installed")


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """A server for all tests that do not stop it."""
    with serving(local.build(local.Options())) as running:
        yield running


@pytest.fixture
def sandbox(service: Service) -> Iterator[e2b.Sandbox]:
    made = e2b.Sandbox.create(timeout=120, **service.sdk)
    yield made
    made.kill()
