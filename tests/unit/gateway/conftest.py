"""A gateway in front of an engine that records its exact prompts and replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import pytest

from swerl.core.turn import Sampling
from swerl.gateway.conversation import Conversation
from swerl.gateway.limits import SessionLimits
from swerl.gateway.prompting import HistoryPolicy, prompter
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


def conversation_with(
    engine: RecordingEngine,
    *,
    max_new_tokens: int = 100,
    policy: HistoryPolicy = HistoryPolicy.EXACT,
    **limits: int,
) -> Conversation:
    """Return a conversation with an engine, without a server in between."""
    return Conversation(
        "s",
        prompter(engine, engine.family, "s", policy),
        sampling=Sampling(max_new_tokens),
        limits=SessionLimits(**limits),
        on_turn=None,
    )


def open_in(
    gateway: Gateway, session_id: str = "s", *, sampling: Sampling | None = None, **limits: float
) -> Session:
    chosen = sampling or Sampling(max_new_tokens=1000)
    return gateway.open(session_id, sampling=chosen, limits=SessionLimits(**limits))  # type: ignore[arg-type]
