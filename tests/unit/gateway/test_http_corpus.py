"""The gateway against HTTP that divides servers, and against broken text in every field."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson
import pytest

from tests.http_corpus import (
    CHUNKED,
    CHUNKS,
    NUM_PIPELINED,
    REFUSED,
    SERVED,
    UPGRADES,
    answers,
    converse,
    offer,
    replay,
)
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession
from tests.unit.gateway.test_fuzz import BODIES

HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
async def test_a_request_is_read_in_one_way_only(
    open_session: OpenSession, engine: RecordingEngine, name: str
) -> None:
    session = open_session()
    first = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\n".encode()
    port = int(session.url.rpartition(":")[2])

    sent = REFUSED.get(name) or SERVED[name]
    answer = await replay("127.0.0.1", port, sent, first=first, hidden=HIDDEN)

    assert answers(answer) == ([200] * 3 if name in SERVED else [400]), answer
    assert engine.calls == []
    assert b"Traceback" not in answer


@pytest.mark.parametrize("name", CHUNKS)
async def test_a_chunked_body_is_its_data_alone(open_session: OpenSession, name: str) -> None:
    session = open_session()
    first = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\n".encode()
    port = int(session.url.rpartition(":")[2])

    sent = b"<FIRST>" + CHUNKED + b"\r\n" + CHUNKS[name]
    answer = await replay("127.0.0.1", port, sent, first=first, hidden=HIDDEN)

    assert answers(answer) == [400, 200]
    assert b"messages" in answer and b"JSON" not in answer


async def test_many_pipelined_requests_are_each_answered(open_session: OpenSession) -> None:
    port = int(open_session().url.rpartition(":")[2])

    sent = b"<HIDDEN>" * NUM_PIPELINED
    answer = await replay("127.0.0.1", port, sent, first=b"", hidden=HIDDEN)

    assert answers(answer) == [200] * (NUM_PIPELINED + 1)


@pytest.mark.parametrize("protocol", UPGRADES)
async def test_no_offer_to_change_the_protocol_is_accepted(
    open_session: OpenSession, engine: RecordingEngine, protocol: str
) -> None:
    session = open_session()
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": [MESSAGE]})
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\n"
    asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    port = int(session.url.rpartition(":")[2])

    requests = offer(asked, protocol), offer(HIDDEN, protocol), HIDDEN
    answer = await converse("127.0.0.1", port, *requests)

    assert answers(answer) == [200] * 3
    assert len(engine.calls) == 1


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every text in a body."""
    if isinstance(value, str):
        yield path
    named = dict(enumerate(value)) if isinstance(value, list) else value
    for key, part in named.items() if isinstance(named, dict) else ():
        yield from fields(part, (*path, key))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("broken", [b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800", b"\0"])
async def test_broken_text_in_any_field_is_an_answer_or_the_vendors_refusal(
    open_session: OpenSession, path: str, broken: bytes
) -> None:
    session = open_session(max_turns=10**6, requests_per_minute=10**6)
    headers = {"Authorization": f"Bearer {session.key}"}
    places = list(fields(BODIES[path]))
    async with aiohttp.ClientSession(headers=headers) as http:
        for place in places:
            body = copy.deepcopy(BODIES[path])
            held = body
            for key in place[:-1]:
                held = held[key]
            held[place[-1]] += "@here@"
            data = orjson.dumps(body).replace(b"@here@", broken)
            async with http.post(session.url + path, data=data) as response:
                answer = await response.read()
            assert response.status in (200, 400), (place, answer)
            assert response.status == 200 or orjson.loads(answer)["error"]["message"]
            answer.decode()
    assert len(places) > 20
