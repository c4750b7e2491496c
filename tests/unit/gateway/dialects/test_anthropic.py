"""Anthropic Messages, tested with the vendor's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from swerl.core.chat import Message, Role, Tool, ToolCall
from swerl.core.errors import GatewayError
from swerl.gateway.dialects.anthropic import build
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

ASK: Any = {"role": "user", "content": "fix it"}
TOOLS: Any = [
    {
        "name": "bash",
        "description": "Run a command.",
        "input_schema": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "timeout": {"type": "integer"}},
        },
    }
]
SAID = Message(
    Role.ASSISTANT,
    "I look.",
    "Hm, é.",
    (
        ToolCall("", "bash", {"cmd": "ls\n", "timeout": "50"}),
        ToolCall("", "bash", {"cmd": 'echo "é"'}),
    ),
)


@pytest.fixture
async def client(session: Session) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=session.url, api_key=session.key, max_retries=0
    ) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_arrives_whole_and_is_known_again(
    engine: RecordingEngine, client: anthropic.AsyncAnthropic, session: Session, stream: bool
) -> None:
    engine.lines = [SAID]

    reply = await ask(client, stream=stream, messages=[ASK], tools=TOOLS)

    thinking, text, first, second = reply.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm, é.")
    assert (text.type, text.text) == ("text", "I look.")
    assert (first.name, first.input) == ("bash", {"cmd": "ls\n", "timeout": 50})
    assert second.input == {"cmd": 'echo "é"'}
    assert first.id != second.id
    assert reply.stop_reason == "tool_use"
    results = {"role": "user", "content": [result(first.id), result(second.id)]}
    messages = [ASK, {"role": "assistant", "content": reply.content}, results]
    await ask(client, messages=messages, tools=TOOLS, stream=stream)
    assert [turn.parent for turn in (await session.close()).turns] == [None, 0]


def call(call_id: str) -> Any:
    return {"type": "tool_use", "id": call_id, "name": "bash", "input": {}}


def result(call_id: str) -> Any:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "ok"}


def parse(*messages: Any, **more: Any) -> tuple[Message, ...]:
    return build().parse({"model": "m", "messages": list(messages), **more}).messages


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        [
            {"type": "text", "text": "x-anthropic-billing-header: cch=5f2"},
            {"type": "text", "text": "Be brief."},
        ],
    ],
)
def test_the_system_prompt_is_one_message_without_stamps(system: Any) -> None:
    assert parse(ASK, system=system)[0] == Message(Role.SYSTEM, "Be brief.")


def test_each_tool_result_is_a_message_in_order() -> None:
    calls = [call("a"), call("b"), call("c")]
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": "plain"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
        {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [{"type": "text", "text": "x"}, {"type": "image", "source": {}}],
        },
        {"type": "text", "text": "go"},
        {"type": "text", "text": "on"},
    ]
    said = {"role": "assistant", "content": calls}

    assert parse(ASK, said, {"role": "user", "content": content})[2:] == (
        Message(Role.TOOL, "plain", tool_call_id="a"),
        Message(Role.TOOL, "[error]", tool_call_id="b"),
        Message(Role.TOOL, "x\n[image left out: this model reads text only]", tool_call_id="c"),
        Message(Role.USER, "go\non"),
    )


def test_neighbouring_assistant_messages_are_one_turn() -> None:
    said = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", "signature": ""}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "?"}]},
        {"role": "assistant", "content": "text"},
        {"role": "assistant", "content": [call("a")]},
        {"role": "user", "content": [result("a")]},
    ]

    assert parse(ASK, *said)[1:-1] == (
        Message(Role.ASSISTANT, "text", "h", (ToolCall("a", "bash", {}),)),
    )


@pytest.mark.parametrize(
    "after",
    [
        [],
        [ASK],
        [ASK, {"role": "user", "content": [result("a"), result("b")]}],
        [{"role": "user", "content": [result("b")]}, {"role": "assistant", "content": "Hm."}],
    ],
)
def test_a_call_without_its_result_next_is_refused(after: Any) -> None:
    said = {"role": "assistant", "content": [call("a"), call("b")]}

    with pytest.raises(GatewayError, match="none was sent for a"):
        parse(ASK, said, *after)


@pytest.mark.parametrize("deferred", [False, True])
def test_two_tools_of_one_name_are_refused(deferred: bool) -> None:
    tool = {"name": "bash", "input_schema": {"type": "object"}}

    with pytest.raises(GatewayError, match=r"tools.1: .*unique"):
        parse(ASK, tools=[tool, {**tool, "defer_loading": deferred}])


def test_only_tools_that_the_model_can_call_now_are_offered() -> None:
    schema = {"type": "object"}
    tools = [
        {"name": "bash", "description": "Run.", "input_schema": schema},
        {"name": "later", "input_schema": schema, "defer_loading": True},
        {"name": "loaded", "description": "L.", "input_schema": schema, "defer_loading": True},
    ]
    found = [{"type": "tool_reference", "tool_name": "loaded"}]
    messages = [
        {"role": "assistant", "content": [call("a")]},
        {"role": "user", "content": [{**result("a"), "content": found}]},
    ]

    request = build().parse({"model": "m", "messages": messages, "tools": tools})

    assert request.tools == (Tool("bash", "Run.", schema),)
    assert request.late_tools == (Tool("loaded", "L.", schema),)
    definition = '{"name":"loaded","description":"L.","input_schema":{"type":"object"}}'
    assert request.messages[1].text == f"[tool loaded can be called: {definition}]"


def test_a_system_message_adds_and_removes_tools_where_it_stands() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [
        {"name": "bash", "input_schema": schema},
        {"name": "web", "input_schema": schema, "defer_loading": True},
    ]
    inline = {"name": "new", "description": "N.", "input_schema": schema}
    blocks = [
        {"type": "text", "text": "Changed:"},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "web"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": inline}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "bash"}},
    ]
    late = {"role": "system", "content": blocks}
    settings = {"role": "system", "output_config": {"effort": "low"}}

    request = build().parse({"model": "m", "messages": [ASK, late, settings], "tools": tools})

    assert [tool.name for tool in request.tools] == ["bash"]
    assert [tool.name for tool in request.late_tools] == ["web", "new"]
    _, told = request.messages
    assert told.role is Role.SYSTEM
    first, web, new, gone = told.text.split("\n")
    assert first == "Changed:"
    assert web.startswith("[tool web can be called: {")
    assert '"n":{"type":"integer"}' in new
    assert gone == "[tool bash can be called no more]"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"name": "web_search", "type": "web_search_20250305"}]},
        {"tools": [{"name": "bash", "type": "bash_20250124"}]},
        {"tools": [{"type": "mcp_toolset", "mcp_server_name": "m"}]},
        {"mcp_servers": [{"type": "url", "url": "u", "name": "m"}]},
    ],
)
def test_requests_that_need_the_vendors_servers_are_refused(more: Any) -> None:
    with pytest.raises(GatewayError, match=r"tools.0: .*input_schema|mcp_servers"):
        parse(ASK, **more)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "compaction", "content": "So far: nothing."}, "So far: nothing."),
        ({"type": "compaction", "content": None}, ""),
        ({"type": "fallback", "from": {}, "to": {}}, ""),
        ({"type": "redacted_thinking", "data": "?"}, ""),
        ({"type": "server_tool_use", "id": "s"}, '{"type":"server_tool_use","id":"s"}'),
        ({"type": "web_fetch_tool_result"}, '{"type":"web_fetch_tool_result"}'),
        ({"type": "container_upload"}, "[container_upload left out: this model reads text only]"),
    ],
)
def test_blocks_of_the_vendors_own_services_are_read_as_text(block: Any, text: str) -> None:
    assert parse(ASK, {"role": "assistant", "content": [block]})[1].text == text


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool = False, **sent: Any) -> Any:
    if not stream:
        return await client.messages.create(model="m", max_tokens=500, **sent)
    async with client.messages.stream(model="m", max_tokens=500, **sent) as events:
        return await events.get_final_message()


async def test_continuing_a_stored_thread_asks_for_the_whole_conversation(session: Session) -> None:
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key) as client:
        with pytest.raises(anthropic.BadRequestError, match="nothing is stored here") as caught:
            thread = {"type": "continue", "previous_message_id": "msg_1"}
            await ask(client, messages=[ASK], extra_body={"thread": thread})

    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_not_found"}
