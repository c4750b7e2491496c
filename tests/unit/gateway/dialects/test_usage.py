"""Usage that agents can rely on: prompt, reply, thinking and cached tokens."""

from __future__ import annotations

from typing import Any

import pytest

from swerl.core.chat import Message, Role
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession
from tests.unit.gateway.test_server import post

ASK: Any = {"role": "user", "content": "fix it"}
THOUGHT = Message(Role.ASSISTANT, "Yes.", "Hm, é.")
PATHS = {
    "/v1/messages": {"model": "m", "max_tokens": 500, "messages": [ASK]},
    "/v1/chat/completions": {"model": "m", "messages": [ASK]},
    "/v1/responses": {"model": "m", "input": [ASK]},
}


def details(usage: Any) -> tuple[int, int, int, int]:
    """Return prompt, cached, reply and thinking tokens in each vendor's format."""
    if "prompt_tokens" in usage:
        said, asked = usage["completion_tokens_details"], usage["prompt_tokens_details"]
        counts = (usage["prompt_tokens"], asked["cached_tokens"], usage["completion_tokens"])
        return (*counts, said["reasoning_tokens"])
    said = usage["output_tokens_details"]
    if "input_tokens_details" in usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, usage["output_tokens"], said["reasoning_tokens"]
    cached = usage["cache_read_input_tokens"]
    asked = usage["input_tokens"] + cached
    return asked, cached, usage["output_tokens"], said["thinking_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", [None, 5])
async def test_thinking_is_counted_in_every_vendors_words(
    engine: RecordingEngine, open_session: OpenSession, path: str, cut: int | None
) -> None:
    engine.lines = [THOUGHT]
    key = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    body = {**PATHS[path], **({key: cut} if cut else {})}
    _, answer = await post(open_session(), path, json=body)

    (call,) = engine.calls
    spoken = engine.family.text(call.output)
    asked, cached, said, thought = details(answer["usage"])
    assert (asked, cached, said) == (len(call.prompt), 1, len(call.output))
    if cut:
        assert thought == said == cut
    else:
        assert engine.family.text(call.output[:thought]).endswith("</think>")
        assert engine.family.text(call.output[thought:]) == spoken.partition("</think>")[2]


@pytest.mark.parametrize(
    ("counter", "path", "more"),
    [
        ("/v1/messages/count_tokens", "/v1/messages", {"system": "Be brief."}),
        ("/v1/responses/input_tokens", "/v1/responses", {"input": "naïve 🐢 text"}),
    ],
)
async def test_counted_tokens_are_those_of_the_prompt_and_of_the_usage(
    engine: RecordingEngine, open_session: OpenSession, counter: str, path: str, more: Any
) -> None:
    session, body = open_session(), {**PATHS[path], **more}
    _, counted = await post(session, counter, json=body)
    _, answer = await post(session, path, json=body)

    assert counted["input_tokens"] == len(engine.calls[0].prompt) == details(answer["usage"])[0]
    assert len((await session.close()).turns) == 1
