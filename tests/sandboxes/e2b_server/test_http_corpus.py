"""The sandbox server against HTTP that divides servers."""

from __future__ import annotations

import pytest

from tests.http_corpus import REFUSED, SERVED, answers, replay

from .helpers import KEY, Service

CREDENTIALS = f"Host: x\r\nX-API-Key: {KEY}\r\n".encode()
HIDDEN = b"GET /health HTTP/1.1\r\n" + CREDENTIALS + b"\r\n"


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
async def test_a_request_is_read_in_one_way_only(service: Service, name: str) -> None:
    first = b"POST /sandboxes/none/timeout HTTP/1.1\r\n" + CREDENTIALS
    port = int(service.url.rpartition(":")[2])

    sent = REFUSED.get(name) or SERVED[name]
    answer = await replay("127.0.0.1", port, sent, first=first, hidden=HIDDEN)

    assert answers(answer) == ([200] * 3 if name in SERVED else [400]), answer
    assert b"Traceback" not in answer and KEY.encode() not in answer
