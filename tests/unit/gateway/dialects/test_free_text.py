"""Custom tools of OpenAI's clients: one free text per call, in both directions."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.gateway.dialects import openai_chat, openai_responses
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

ASK: Any = {"role": "user", "content": "fix it"}
PATCH = '*** Begin Patch\n+"é"\n*** End Patch'
GRAMMAR = {"syntax": "lark", "definition": "start: /.+/"}
CHAT_TOOL: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Patch.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
TOOL: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch.",
    "format": {"type": "grammar", **GRAMMAR},
}
TEAM: Any = {"type": "namespace", "name": "team", "description": "", "tools": [TOOL]}
SAID = Message(
    Role.ASSISTANT,
    "I patch.",
    tool_calls=(
        ToolCall("", "apply_patch", {"input": PATCH}),
        ToolCall("", "apply_patch", {"path": "a"}),
    ),
)
TOLD = "Patch.\n\nThe input follows this lark grammar:\nstart: /.+/"


def test_the_model_sees_a_tool_with_one_argument_and_its_grammar() -> None:
    chat = openai_chat.build().parse({"model": "m", "messages": [ASK], "tools": [CHAT_TOOL]})
    other = openai_responses.build().parse({"model": "m", "input": "x", "tools": [TOOL, TEAM]})

    assert chat.tools == other.tools[:1]
    assert [tool.name for tool in other.tools] == ["apply_patch", "team.apply_patch"]
    assert chat.tools[0].description == TOLD
    assert chat.tools[0].parameters["required"] == ["input"]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_calls_bring_the_text_and_are_known_again(
    engine: RecordingEngine, client: openai.AsyncOpenAI, session: Session, stream: bool
) -> None:
    engine.lines = [SAID]
    sent: dict[str, Any] = {"model": "m", "tools": [CHAT_TOOL]}
    if stream:
        chunks = await client.chat.completions.create(**sent, messages=[ASK], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in chunks]
        found = [call for delta in deltas for call in delta.tool_calls or ()]
        calls = [call.model_dump(exclude={"index"}, exclude_none=True) for call in found]
    else:
        reply = await client.chat.completions.create(**sent, messages=[ASK])
        calls = [call.model_dump() for call in reply.choices[0].message.tool_calls]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    echo = {"role": "assistant", "content": "I patch.", "tool_calls": calls}
    await client.chat.completions.create(**sent, messages=[ASK, echo, *results])

    assert [call["type"] for call in calls] == ["custom", "custom"]
    assert [call["custom"]["input"] for call in calls] == [PATCH, '{"path":"a"}']
    assert [turn.parent for turn in (await session.close()).turns] == [None, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_calls_bring_the_text_and_are_known_again(
    engine: RecordingEngine, client: openai.AsyncOpenAI, session: Session, stream: bool
) -> None:
    engine.lines = [SAID]
    sent: dict[str, Any] = {"model": "m", "tools": [TOOL, TEAM]}
    told: list[Any] = []
    if stream:
        async with client.responses.stream(**sent, input=[ASK]) as events:
            told = [event async for event in events]
            reply: Any = await events.get_final_response()
    else:
        reply = await client.responses.create(**sent, input=[ASK])
    calls = [item for item in reply.output if item.type == "custom_tool_call"]
    results = [
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        for call in calls
    ]
    echo = [item.model_dump(exclude_none=True) for item in reply.output]
    await client.responses.create(**sent, input=[ASK, *echo, *results])

    assert [call.input for call in calls] == [PATCH, '{"path":"a"}']
    deltas = [e.delta for e in told if e.type == "response.custom_tool_call_input.delta"]
    assert deltas == ([PATCH, '{"path":"a"}'] if stream else [])
    assert [turn.parent for turn in (await session.close()).turns] == [None, 0]
    assert "ok" in engine.family.text(engine.calls[1].prompt)
