"""The gateway reads each request of the corpus in one way, and answers no hidden one."""

from __future__ import annotations

import pytest

from tests.http_corpus import REFUSED, SERVED, answers, replay
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession

HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
async def test_a_request_is_read_in_one_way_only(
    open_session: OpenSession, engine: RecordingEngine, name: str
) -> None:
    session = open_session()
    first = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\n".encode()
    port = int(session.url.rpartition(":")[2])

    request = REFUSED.get(name) or SERVED[name]
    answer = await replay("127.0.0.1", port, request, first=first, hidden=HIDDEN)

    assert answers(answer) == ([200] * 3 if name in SERVED else [400]), answer
    assert engine.calls == []
    assert b"Traceback" not in answer
