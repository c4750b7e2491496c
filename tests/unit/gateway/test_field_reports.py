"""What users of peers reported at the seam of agent and model, asked of the gateway over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.engines.families._tokenizer import Special
from swerl.gateway.server import Gateway
from tests.unit.engines.families.test_templates import MakeFamily
from tests.unit.engines.families.test_templates import make_family as make_family
from tests.unit.engines.families.test_templates import tokenizers as tokenizers
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession, open_in
from tests.unit.gateway.test_server import ASK, body, post

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BASH: Any = {"name": "Bash", "input_schema": {"type": "object"}}
CALL = Message(Role.ASSISTANT, "", "", (ToolCall("", "Bash", {"command": "ls"}),))


def sampled_ids(family: Any, text: str) -> list[int]:
    """Return the ids of a reply in which special tokens stand by their names."""
    names = sorted(family._tokenizer.names(), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    pieces = [Special(part) if n % 2 else part for n, part in enumerate(parts) if part]
    ids: list[int] = family._tokenizer.encode(pieces)
    return ids


def cases(shared_dir: Path) -> list[Any]:
    folder = shared_dir / "cases" / "gateway"
    return [json.loads(path.read_text()) | {"id": path.stem} for path in folder.glob("*.json")]


async def test_replies_of_the_reported_cases_reach_the_client(
    make_family: MakeFamily, shared_dir: Path
) -> None:
    read = [case for case in cases(shared_dir) if "tools" in case and "sampled" in case]
    assert len(read) > 8
    for case in read:
        family = make_family(case["template"])
        engine = RecordingEngine([sampled_ids(family, case["sampled"])], family=family)
        tools = [{"name": n, "input_schema": schema} for n, schema in case["tools"].items()]
        async with Gateway(engine=engine, family=family) as gateway:
            session = open_in(gateway)
            _, answer = await post(session, json=body(tools=tools))
            trajectory = await session.close()
        blocks = [b for b in answer["content"] if b["type"] == "tool_use"]
        calls = [[b["name"], b["input"]] for b in blocks]
        if isinstance(case["expect"], dict):
            assert calls == case["expect"]["calls"], case["id"]
            text = "".join(b["text"] for b in answer["content"] if b["type"] == "text")
            assert text == case["expect"].get("text", text)
        else:
            assert trajectory.turns[0].malformed_calls == 1
            assert calls == [["malformed_tool_call", {}]]


async def test_requests_of_the_reported_cases_are_answered(
    make_family: MakeFamily, shared_dir: Path
) -> None:
    for case in (case for case in cases(shared_dir) if "http" in case):
        family = make_family(case["template"])
        said = sampled_ids(family, case.get("sampled", "</think>\n\nyes<|im_end|>"))
        engine = RecordingEngine([said], family=family)
        async with Gateway(engine=engine, family=family) as gateway:
            path, request = case["http"]
            status, answer = await post(open_in(gateway), path, json={**request, "max_tokens": 500})
        assert status == 200, case["id"]
        assert case.get("expect_prompt_contains", "") in family.text(engine.calls[0].prompt)
        if "tool_choice" in request:
            assert answer["stop_reason"] == "end_turn"
            assert not [b for b in answer["content"] if b["type"] == "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_reply_for_client_and_model(
    engine: RecordingEngine, open_session: OpenSession, stream: bool
) -> None:
    engine.lines = [Message(Role.ASSISTANT, "one </b> two", "a </b> thought", CALL.tool_calls)]
    session = open_session()
    stops = ["absent", "</b>"]
    if stream:
        request = body(stop_sequences=stops, tools=[BASH], stream=True)
        headers = {"x-api-key": session.key}
        async with (
            aiohttp.ClientSession(session.url, headers=headers) as http,
            http.post(MESSAGES, json=request) as response,
        ):
            text = await response.text()
        assert '"stop_reason":"stop_sequence","stop_sequence":"</b>"' in text
        assert "two" not in text
    else:
        _, first = await post(session, json=body(stop_sequences=stops, tools=[BASH]))
        assert (first["stop_reason"], first["stop_sequence"]) == ("stop_sequence", "</b>")
        assert first["content"][-1]["text"] == "one "
    said = {"role": "assistant", "content": [{"type": "text", "text": "one"}]}
    await post(session, json=body(ASK, said, ASK, tools=[BASH]))
    turns = (await session.close()).turns
    assert turns[1].parent == 0
    assert "one </b><|im_end|>" in engine.family.text(engine.calls[1].prompt)


@pytest.mark.parametrize("kept", [0, 1])
async def test_equal_texts_continue_the_branch_whose_thinking_the_client_sent(
    engine: RecordingEngine, open_session: OpenSession, kept: int
) -> None:
    engine.lines = [Message(Role.ASSISTANT, "same", thinking) for thinking in ("one", "two")]
    session = open_session()
    replies = [(await post(session, json=body()))[1] for _ in range(2)]
    said = {"role": "assistant", "content": replies[kept]["content"]}
    await post(session, json=body(ASK, said, ASK))
    assert (await session.close()).turns[2].parent == kept


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "LINE"}, "LINE"),
        ({"type": "content", "content": "LINE"}, "LINE"),
        ({"type": "content", "content": [{"type": "text", "text": "LINE"}]}, "LINE"),
        ({"type": "base64", "media_type": "application/pdf", "data": "xx"}, "left out"),
    ],
)
@pytest.mark.parametrize("in_result", [False, True])
async def test_a_document_of_plain_text_is_read(
    engine: RecordingEngine, open_session: OpenSession, source: Any, text: str, in_result: bool
) -> None:
    document = {"type": "document", "title": "notes.txt", "source": source}
    use = {"type": "tool_use", "id": "x", "name": "Bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [document]}
    user = {"role": "user", "content": [result if in_result else document]}
    before = [ASK, {"role": "assistant", "content": [use]}] if in_result else []
    status, _ = await post(open_session(), json=body(*before, user, tools=[BASH]))
    prompt = engine.family.text(engine.calls[0].prompt)
    assert status == 200
    assert "notes.txt" in prompt
    assert text in prompt


@pytest.mark.parametrize(("sent", "status"), [(40.0, 200), (40.5, 400), (0, 400), ("40", 400)])
@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_a_whole_number_of_tokens_may_be_written_as_a_fraction(
    engine: RecordingEngine, open_session: OpenSession, path: str, sent: Any, status: int
) -> None:
    got, _ = await post(open_session(), path, json=body(max_tokens=sent))
    assert got == status
    assert [call.sampling.max_new_tokens for call in engine.calls] == [40] * (got == 200)
