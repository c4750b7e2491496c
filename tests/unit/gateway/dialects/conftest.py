"""The gateway's fixtures: dialects are tested through it, with the vendors' own clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from swerl.gateway.sessions import Session
from tests.unit.gateway.conftest import OpenSession
from tests.unit.gateway.conftest import engine as engine
from tests.unit.gateway.conftest import gateway as gateway
from tests.unit.gateway.conftest import open_session as open_session


@pytest.fixture
def session(open_session: OpenSession) -> Session:
    return open_session()


@pytest.fixture
async def client(session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=session.url + "/v1", api_key=session.key, max_retries=0
    ) as made:
        yield made
