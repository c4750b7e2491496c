"""Requests of the vendors' clients beside chat, and inconsistent conversations."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from yarl import URL

from swerl.core.errors import InputError
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession

HI = {"role": "user", "content": "hi"}


def anthropic(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": list(messages or (HI,)), **more}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def uses(*ids: str) -> dict[str, Any]:
    return said(*({"type": "tool_use", "id": one, "name": "bash", "input": {}} for one in ids))


def results(*ids: str) -> dict[str, Any]:
    blocks = [{"type": "tool_result", "tool_use_id": one, "content": "x"} for one in ids]
    return {"role": "user", "content": blocks}


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": "no object"}
    listed = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def done(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


async def post(
    session: Any, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    sent = {"Authorization": f"Bearer {session.key}", **(headers or {})}
    async with (
        aiohttp.ClientSession(headers=sent) as http,
        http.post(session.url + path, json=body) as response,
    ):
        return response.status, await response.json()


MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, anthropic(HI, uses("a"), results("a"), uses("a"), results("a"))),
        (CHAT, anthropic(HI, calls("a"), done("a"), calls("a"), done("a"))),
    ],
)
async def test_an_id_may_come_again_once_its_call_is_answered(
    open_session: OpenSession, path: str, body: Any
) -> None:
    assert (await post(open_session(), path, body))[0] == 200


async def test_a_conversation_that_the_chat_template_refuses_is_the_clients_mistake(
    engine: RecordingEngine, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object) -> list[int]:
        message = "no user query found"
        raise InputError(message)

    monkeypatch.setattr(engine.family, "render", refuse)

    status, answer = await post(open_session(), MESSAGES, anthropic())

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "no user query" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("counter", "path", "body"),
    [
        ("/v1/messages/count_tokens", MESSAGES, anthropic(system="Be brief.")),
        ("/v1/responses/input_tokens", RESPONSES, {"model": "m", "input": "naïve 🐢 text"}),
    ],
)
async def test_counted_tokens_are_those_of_the_prompt_and_of_the_usage(
    engine: RecordingEngine, open_session: OpenSession, counter: str, path: str, body: Any
) -> None:
    session = open_session()
    _, counted = await post(session, counter, body)
    _, answer = await post(session, path, body)
    usage = answer["usage"]

    assert counted["input_tokens"] == len(engine.calls[0].prompt)
    cached = usage.get("cache_read_input_tokens", 0)
    assert usage["input_tokens"] + cached == counted["input_tokens"]
    assert usage["output_tokens"] == len(engine.calls[0].output)
    assert len((await session.close()).turns) == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/m", 200),
        ("/v1/models/org/m", 200),
        ("/v1/models/..", 404),
        ("/v1/modelsx", 404),
    ],
)
async def test_any_model_name_has_a_page(open_session: OpenSession, path: str, status: int) -> None:
    session = open_session()
    headers = {"x-api-key": session.key}
    url = URL(session.url + path, encoded=True)
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url) as response:
        assert response.status == status
        answer = await response.json()
    if status == 200:
        assert answer["id"] == path.removeprefix("/v1/models/")
        assert (answer["type"], answer["object"]) == ("model", "model")
