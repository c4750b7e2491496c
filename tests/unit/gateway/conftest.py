"""A gateway in front of an engine that records its exact prompts and replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import pytest

from swerl.core.turn import Sampling
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
async def gateway(engine: RecordingEngine) -> AsyncIterator[Gateway]:
    async with Gateway(engine=engine, family=engine.family) as served:
        yield served


OpenSession: TypeAlias = Callable[..., Session]


@pytest.fixture
def open_session(gateway: Gateway) -> OpenSession:
    def open_one(
        session_id: str = "s", *, sampling: Sampling | None = None, **limits: float
    ) -> Session:
        return open_in(gateway, session_id, sampling=sampling, **limits)

    return open_one


def open_in(
    gateway: Gateway, session_id: str = "s", *, sampling: Sampling | None = None, **limits: float
) -> Session:
    chosen = sampling or Sampling(max_new_tokens=1000)
    return gateway.open(session_id, sampling=chosen, limits=SessionLimits(**limits))  # type: ignore[arg-type]
