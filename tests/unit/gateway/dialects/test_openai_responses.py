"""OpenAI Responses, tested with the vendor's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.errors import GatewayError
from swerl.gateway.dialects.openai_responses import build
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

ASK: Any = {"role": "user", "content": "fix it"}
PARAMETERS: Any = {"type": "object", "properties": {"timeout": {"type": "integer"}}}
BASH: Any = {"type": "function", "name": "bash", "description": "Run it.", "parameters": PARAMETERS}
TEAM: Any = {"type": "namespace", "name": "team", "description": "", "tools": [BASH]}
TOOLS: Any = [BASH, TEAM, {"type": "web_search"}]
SAID = Message(
    Role.ASSISTANT,
    "I look.",
    "Hm.",
    (ToolCall("", "bash", {"timeout": "50"}), ToolCall("", "team.bash", {"cmd": 'echo "é"\n'})),
)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_arrives_whole_and_is_known_again(
    engine: RecordingEngine, client: openai.AsyncOpenAI, session: Session, stream: bool
) -> None:
    engine.lines = [SAID]

    reply = await ask(client, stream=stream, input=[ASK], tools=TOOLS)

    thought, message, first, second = reply.output
    assert thought.content[0].text == "Hm."
    assert message.content[0].text == reply.output_text == "I look."
    assert (first.name, json.loads(first.arguments)) == ("bash", {"timeout": 50})
    assert (second.name, json.loads(second.arguments)) == ("bash", {"cmd": 'echo "é"\n'})
    assert (first.namespace, second.namespace) == (None, "team")
    assert first.call_id != second.call_id
    assert reply.status == "completed"
    assert reply.usage.input_tokens == len(engine.calls[0].prompt)
    assert reply.usage.output_tokens == len(engine.calls[0].output)
    assert reply.usage.input_tokens_details.cached_tokens == 1
    echoed = [item.model_dump(exclude_none=True) for item in reply.output]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in (second, first)
    ]
    await ask(client, input=[ASK, *echoed, *results], tools=TOOLS, stream=stream)
    assert [turn.parent for turn in (await session.close()).turns] == [None, 0]


def parse(*items: Any, **more: Any) -> tuple[Message, ...]:
    return build().parse({"model": "m", "input": list(items), **more}).messages


def test_every_item_is_read_and_the_assistants_are_one_message() -> None:
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]
    call = {"type": "function_call", "call_id": "a", "name": "b", "arguments": '{"c": 1}'}

    assert parse(
        {"type": "message", "role": "developer", "content": "Brief."},
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        {**call, "call_id": "d", "namespace": "team", "arguments": "oops"},
        {
            "type": "function_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "1"}],
        },
        {"type": "function_call_output", "call_id": "a", "output": "2"},
        instructions="Be kind.",
    ) == (
        Message(Role.SYSTEM, "Be kind."),
        Message(Role.SYSTEM, "Brief."),
        Message(Role.USER, "x\n[input_image left out: this model reads text only]"),
        Message(
            Role.ASSISTANT,
            "I look.",
            "Hm.",
            (ToolCall("a", "b", {"c": 1}), ToolCall("d", "team.b", {"arguments": "oops"})),
        ),
        Message(Role.TOOL, "2", tool_call_id="a"),
        Message(Role.TOOL, "1", tool_call_id="d"),
    )


def test_a_call_needs_its_output_somewhere_after_it() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": ""}
    steer = {"role": "user", "content": "Faster."}

    assert len(parse(call, steer, output)) == 3
    with pytest.raises(GatewayError, match="none was sent for a"):
        parse(call, steer)


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("web_search_call", Role.ASSISTANT),
        ("shell_call_output", Role.USER),
        ("mcp_approval_response", Role.USER),
        ("additional_tools", Role.SYSTEM),
    ],
)
def test_items_of_the_vendors_own_tools_keep_their_role(kind: str, role: Role) -> None:
    assert parse(ASK, {"type": kind, "id": "i"})[1] == Message(
        role, f'{{"type":"{kind}","id":"i"}}'
    )


async def ask(client: openai.AsyncOpenAI, *, stream: bool = False, **sent: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", **sent)
    async with client.responses.stream(model="m", **sent) as events:
        return await events.get_final_response()
