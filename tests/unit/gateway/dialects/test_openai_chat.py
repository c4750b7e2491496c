"""OpenAI Chat Completions, tested with the vendor's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.gateway.dialects.openai_chat import build
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

ASK: Any = {"role": "user", "content": "fix it"}
PARAMETERS: Any = {"type": "object", "properties": {"timeout": {"type": "integer"}}}
BASH: Any = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": BASH}]
SAID = Message(
    Role.ASSISTANT,
    "I look.",
    "Hm.",
    (ToolCall("", "bash", {"timeout": "50"}), ToolCall("", "bash", {"cmd": 'echo "é"\n'})),
)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_arrives_whole_and_is_known_again(
    engine: RecordingEngine, client: openai.AsyncOpenAI, session: Session, stream: bool
) -> None:
    engine.lines = [SAID]

    reply = await ask(client, stream=stream, messages=[ASK], tools=TOOLS)

    choice = reply.choices[0]
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"timeout": 50},
        {"cmd": 'echo "é"\n'},
    ]
    assert calls[0].id != calls[1].id
    assert choice.finish_reason == "tool_calls"
    assert reply.usage.prompt_tokens == len(engine.calls[0].prompt)
    assert reply.usage.completion_tokens == len(engine.calls[0].output)
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
    said = choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    await ask(client, messages=[ASK, said, *answers[::-1]], tools=TOOLS, stream=stream)
    assert [turn.parent for turn in (await session.close()).turns] == [None, 0]


def parse(*messages: Any, **more: Any) -> tuple[Message, ...]:
    return build().parse({"model": "m", "messages": list(messages), **more}).messages


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_every_role_and_content_form_is_read(kind: str) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "b", "arguments": '{"c": 1}'}},
            {"id": "d", "type": "function", "function": {"name": "b", "arguments": "oops"}},
            {"id": "e", "type": "function", "function": {"name": "b", "arguments": ""}},
        ],
    }
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "u"}}]

    assert parse(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        called,
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "ok"}]},
        {"role": "tool", "tool_call_id": "d", "content": ""},
        {"role": "tool", "tool_call_id": "e", "content": ""},
    ) == (
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.USER, f"x\n[{kind} left out: this model reads text only]"),
        Message(
            Role.ASSISTANT,
            "",
            "Hm.",
            (
                ToolCall("a", "b", {"c": 1}),
                ToolCall("d", "b", {"arguments": "oops"}),
                ToolCall("e", "b", {}),
            ),
        ),
        Message(Role.TOOL, "ok", tool_call_id="a"),
        Message(Role.TOOL, "", tool_call_id="d"),
        Message(Role.TOOL, "", tool_call_id="e"),
    )


async def ask(client: openai.AsyncOpenAI, *, stream: bool = False, **sent: Any) -> Any:
    if not stream:
        return await client.chat.completions.create(model="m", **sent)
    async with client.chat.completions.stream(model="m", **sent) as events:
        return await events.get_final_completion()


def test_words_between_a_call_and_its_result_are_read() -> None:
    """Codex 0.94 sends what the model said before a call after it."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]

    request = build().parse({"model": "m", "messages": messages})

    roles = [message.role.value for message in request.messages]
    assert roles == ["user", "assistant", "assistant", "tool"]
