"""Conversation: delivered and lost replies, and their prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swerl.core.chat import ChatReply, ChatRequest, Finish, Json, Message, Role, Tool, ToolCall
from swerl.core.errors import GatewayError
from swerl.gateway.conversation import Conversation
from swerl.gateway.prompting import MALFORMED_CALL
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import conversation_with

ASK = Message(Role.USER, "fix it")


async def ask(conversation: Conversation, *messages: Message) -> ChatReply:
    async with conversation.answer(ChatRequest(messages or (ASK,))) as answer:
        reply = await answer.reply()
        answer.delivered()
        return reply


async def test_the_next_request_proves_that_a_reply_arrived(engine: RecordingEngine) -> None:
    engine.lines = [Message(Role.ASSISTANT, "one"), Message(Role.ASSISTANT, "two")]
    conversation = conversation_with(engine)
    async with conversation.answer(ChatRequest((ASK,))) as answer:
        reply = await answer.reply()
        await ask(conversation, ASK, reply.message, ASK)

    trajectory = await conversation.close()

    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert trajectory.dropped == {}


async def test_the_trajectory_names_the_tools_of_its_first_request(engine: RecordingEngine) -> None:
    """No prompt of the tiny family has the tools in it."""
    look, edit = Tool("look", "Read a file."), Tool("edit", "Change a file.")
    digests = []
    for tools in ([look, edit], [edit, look], [look, Tool("edit", "Change a line.")]):
        engine.lines = [Message(Role.ASSISTANT, "one")]
        conversation = conversation_with(engine)
        async with conversation.answer(ChatRequest((ASK,), tools=tuple(tools))) as answer:
            (await answer.reply()) and answer.delivered()
        digests.append((await conversation.close()).tools)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("values", "is_known"),
    [
        ({"n": "5", "all": "true", "cmd": "ls "}, True),
        ({"n": 5.0, "all": True, "cmd": "ls"}, True),
        ({"n": "005", "all": True, "cmd": "ls"}, True),
        ({"n": "5x", "all": True, "cmd": "ls"}, False),
        ({"n": 6, "all": True, "cmd": "ls"}, False),
        ({"n": 5, "all": True, "cmd": "ls", "x": 1}, False),
    ],
)
async def test_a_client_that_makes_its_own_call_ids_is_known_by_content(
    engine: RecordingEngine, values: dict[str, Json], is_known: bool
) -> None:
    call = ToolCall("", "bash", {"cmd": "ls", "n": 5, "all": True})
    engine.lines = [Message(Role.ASSISTANT, "I look.", "Hm.", (call,))]
    conversation = conversation_with(engine, max_new_tokens=500)
    reply = await ask(conversation)
    own = replace(reply.message, tool_calls=(ToolCall("mine", "bash", values),))
    await ask(conversation, ASK, own, Message(Role.TOOL, "ok", tool_call_id="mine"))

    assert (await conversation.close()).turns[1].parent == (0 if is_known else None)


async def test_a_reply_that_the_engine_aborted_is_not_passed_on(engine: RecordingEngine) -> None:
    engine.gate = asyncio.Event()
    conversation = conversation_with(engine)
    asking = asyncio.create_task(ask(conversation))
    await engine.started.wait()

    await engine.abort("s")

    with pytest.raises(GatewayError, match="aborted") as caught:
        await asking
    assert caught.value.retryable
    assert (await conversation.close()).dropped == {"aborted": 2}


async def test_a_cut_reply_is_closed_before_the_conversation_goes_on(
    engine: RecordingEngine,
) -> None:
    engine.lines = [Message(Role.ASSISTANT, "a long answer")]
    conversation = conversation_with(engine, max_new_tokens=6)
    reply = await ask(conversation)
    await ask(conversation, ASK, reply.message, ASK)

    first, second = engine.calls
    assert (reply.finish, reply.message.text) == (Finish.LENGTH, "a long")
    known = first.prompt + first.output
    assert second.prompt[: len(known)] == known
    assert second.prompt[len(known)] == engine.family.stop_ids[0]


async def test_calls_get_ids_of_their_own_and_the_declared_types(engine: RecordingEngine) -> None:
    call = ToolCall("", "bash", {"timeout": "5", "cmd": "5"})
    engine.lines = [Message(Role.ASSISTANT, tool_calls=(call, call))]
    types = {"timeout": {"type": "integer"}, "cmd": {"type": "string"}}
    request = ChatRequest((ASK,), (Tool("bash", parameters={"properties": types}),))
    async with conversation_with(engine, max_new_tokens=500).answer(request) as answer:
        reply = await answer.reply()

    first, second = reply.message.tool_calls
    assert first.arguments == {"timeout": 5, "cmd": "5"}
    assert first.id != second.id
    assert reply.finish is Finish.TOOL_CALLS


async def test_a_malformed_call_of_an_agent_with_tools_gets_an_error_that_the_model_reads(
    engine: RecordingEngine,
) -> None:
    good = ToolCall("", "bash", {"cmd": "ls"})
    whole = engine.family.encode_reply(Message(Role.ASSISTANT, tool_calls=(good, good)))
    engine.lines = [whole[:-20] + whole[-1:]]
    conversation = conversation_with(engine, max_new_tokens=500)
    request = ChatRequest((ASK,), (Tool("bash"),))
    async with conversation.answer(request) as answer:
        reply = await answer.reply()
        answer.delivered()
    calls = reply.message.tool_calls
    results = [Message(Role.TOOL, f"of {call.name}", "", (), call.id) for call in calls]
    async with conversation.answer(
        ChatRequest((ASK, reply.message, *results), request.tools)
    ) as answer:
        await answer.reply()
        answer.delivered()

    assert [call.name for call in calls] == ["bash", MALFORMED_CALL]
    assert "<tool_call>" in reply.message.text
    assert reply.finish is Finish.TOOL_CALLS
    assert f"of {MALFORMED_CALL}" in engine.family.text(engine.calls[1].prompt)
    trajectory = await conversation.close()
    assert [turn.malformed_calls for turn in trajectory.turns] == [1, 0]
    assert trajectory.turns[0].output_ids == engine.calls[0].output
