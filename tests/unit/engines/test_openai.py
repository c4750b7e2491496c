"""The openai engine, against swerl's own gateway as the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.core.chat import ChatRequest, Finish, Message, Role, Tool, ToolCall
from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, EngineLostError, InputError
from swerl.core.sample import to_samples
from swerl.core.turn import Sampling
from swerl.engines import openai, scripted
from swerl.engines.families import tiny
from swerl.engines.openai import OpenAIEngine, Options
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from tests.unit.gateway.test_server import body, post

FAMILY = tiny.build(None)
SAID = Message(Role.ASSISTANT, "I look.", "Hm.", (ToolCall("", "bash", {"cmd": "ls"}),))
ASK = Message(Role.USER, "fix it")
TOOLS = (Tool("bash", "Run.", {"type": "object", "properties": {}}),)


@asynccontextmanager
async def opened(url: str, key: str | None = None) -> AsyncIterator[OpenAIEngine]:
    options = Options(base_url=url, model="m", api_key=key)
    async with openai.open(options, EngineSetup(FAMILY, Path())) as engine:
        yield engine


@asynccontextmanager
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway that speaks OpenAI chat; its key is in the variable SOME_KEY."""
    setup = EngineSetup(FAMILY, Path(), script=lambda session: [SAID])
    async with (
        scripted.open(scripted.Options(), setup) as engine,
        Gateway(engine=engine, family=FAMILY) as gateway,
    ):
        session = gateway.open("s", sampling=Sampling(500), limits=SessionLimits())
        monkeypatch.setenv("SOME_KEY", session.key)
        yield gateway, gateway.url + "/v1"


def completion(message: dict[str, Any]) -> str:
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    choice = {"message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return json.dumps({"id": "1", "choices": [choice], "usage": usage})


COMPLETION = completion({"content": "I would rather not."})


@asynccontextmanager
async def answering(
    status: int, text: str, refuse: Callable[[Any], str] = lambda body: ""
) -> AsyncIterator[str]:
    """A server that always says the same, except to what it refuses."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "POST" and (refusal := refuse(json.loads(await request.read()))):
            return web.Response(status=400, text=refusal)
        return web.Response(status=status, text=text)

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_a_conversation_goes_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server(monkeypatch) as (_, url), opened(url, "SOME_KEY") as engine:
        reply = await engine.chat(ChatRequest((ASK,), TOOLS, max_tokens=300), "s")
        call = reply.message.tool_calls[0]
        result = Message(Role.TOOL, "a b", tool_call_id=call.id)
        done = await engine.chat(ChatRequest((ASK, reply.message, result), TOOLS), "s")

    assert (reply.message.text, reply.message.thinking) == ("I look.", "Hm.")
    assert (call.name, call.arguments) == ("bash", {"cmd": "ls"})
    assert reply.finish is Finish.TOOL_CALLS
    assert reply.usage.prompt_tokens > 0
    assert (done.message.text, done.finish) == ("Done.", Finish.STOP)


async def test_turns_through_a_chat_engine_are_kept_but_not_trainable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        server(monkeypatch) as (_, url),
        opened(url, "SOME_KEY") as upstream,
        Gateway(engine=upstream, family=FAMILY) as gateway,
    ):
        session = gateway.open("t", sampling=Sampling(500), limits=SessionLimits())
        monkeypatch.setenv("OTHER_KEY", session.key)
        async with opened(gateway.url + "/v1", "OTHER_KEY") as client:
            first = await client.chat(ChatRequest((ASK,), TOOLS), "x")
            result = Message(Role.TOOL, "a", tool_call_id=first.message.tool_calls[0].id)
            await client.chat(ChatRequest((ASK, first.message, result), TOOLS), "x")
        trajectory = await session.close()

    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert not any(turn.trainable for turn in trajectory.turns)
    assert to_samples(trajectory, episode="e", task="t") == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "127.0.0.1/v1", "nonsense"])
async def test_an_absent_server_is_an_error_before_anything_starts(url: str) -> None:
    with pytest.raises(EngineLostError, match="no answer from") as caught:
        async with opened(url):
            pass
    assert "engine.base_url" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (503, "busy", EngineLostError),
        (429, "slow down", EngineLostError),
        (500, "a worker died", EngineLostError),
        (529, "overloaded", EngineLostError),
        (401, '{"error": "key"}', EngineError),
        (200, "<html>", EngineError),
        (200, "[]", EngineError),
        (200, '{"choices": [{"message": null}]}', EngineError),
    ],
)
async def test_a_strange_answer_is_one_clear_error(
    status: int, text: str, kind: type[EngineError]
) -> None:
    async with answering(status, text) as url:
        with pytest.raises(EngineError) as caught:
            async with opened(url) as engine:
                await engine.chat(ChatRequest((ASK,)), "s")
    assert type(caught.value) is kind
    assert caught.value.hint


async def test_the_name_of_the_limit_is_the_one_that_the_server_takes() -> None:
    def refuse(body: Any) -> str:
        return "Use 'max_completion_tokens' instead." if "max_tokens" in body else ""

    async with answering(200, COMPLETION, refuse) as url, opened(url) as engine:
        for _ in range(2):
            reply = await engine.chat(ChatRequest((ASK,), max_tokens=9), "s")
            assert reply.message.text == "I would rather not."


async def test_tools_that_came_late_are_offered_too() -> None:
    def refuse(body: Any) -> str:
        names = [tool["function"]["name"] for tool in body["tools"]]
        return "" if names == ["bash", "late"] else "a tool is missing"

    async with answering(200, COMPLETION, refuse) as url, opened(url) as engine:
        await engine.chat(ChatRequest((ASK,), TOOLS, late_tools=(Tool("late"),)), "s")


async def test_a_blank_reply_is_left_out_of_the_history() -> None:
    def refuse(body: Any) -> str:
        return "a message must not be empty" if len(body["messages"]) > 2 else ""

    past = (ASK, Message(Role.ASSISTANT, "\n", "Hm."), ASK)
    async with answering(200, COMPLETION, refuse) as url, opened(url) as engine:
        await engine.chat(ChatRequest(past), "s")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thinking_goes_back_under_the_name_that_the_server_gave_it(name: str) -> None:
    def refuse(body: Any) -> str:
        said = [message for message in body["messages"] if message["role"] == "assistant"]
        wrong = [message for message in said if message.get(name) not in ("Hm.", "")]
        return f"Missing `{name}` field in the assistant message" if wrong else ""

    text = completion({"content": None, name: "Hm."})
    async with answering(200, text, refuse) as url, opened(url) as engine:
        reply = await engine.chat(ChatRequest((ASK,)), "s")
        assert reply.message.thinking == "Hm."
        past = (ASK, reply.message, ASK, Message(Role.ASSISTANT, "No thought."))
        await engine.chat(ChatRequest((*past, ASK)), "s")


async def test_a_reply_in_parts_and_calls_of_a_lenient_server_are_read() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "text", "text": "I look."},
    ]
    function = {"name": "bash", "arguments": {"cmd": "ls"}}
    message = {"content": parts, "tool_calls": [{"type": "function", "function": function}]}
    async with answering(200, completion(message)) as url, opened(url) as engine:
        said = (await engine.chat(ChatRequest((ASK,), TOOLS), "s")).message
    assert (said.text, said.thinking) == ("I look.", "Hm.")
    assert said.tool_calls == (ToolCall("", "bash", {"cmd": "ls"}),)


@pytest.mark.parametrize(
    "refusal",
    [
        '{"error": {"message": "too long", "code": "context_length_exceeded"}}',
        "'max_completion_tokens' is too large: 9. This model's maximum context length is 8 tokens",
        "The decoder prompt (length 9) is longer than the maximum model length of 8",
        "the request exceeds the available context size",
        "Your request exceeded model token limit: 8",
    ],
)
async def test_a_prompt_over_the_servers_context_is_a_limit_and_no_failure(refusal: str) -> None:
    async with (
        answering(200, COMPLETION, lambda body: refusal) as url,
        opened(url) as engine,
        Gateway(engine=engine, family=FAMILY) as gateway,
    ):
        session = gateway.open("s", sampling=Sampling(500), limits=SessionLimits())
        status, answer = await post(session, json=body())
    assert (status, session.limit) == (400, "max_context_tokens")
    assert "prompt is too long" in answer["error"]["message"]
    assert session.failure is None


@pytest.mark.parametrize(("status", "hint"), [(401, "engine.api_key"), (404, "/v1")])
async def test_a_server_that_refuses_key_or_model_is_an_error_before_anything_starts(
    status: int, hint: str
) -> None:
    async with answering(status, "no") as url:
        with pytest.raises(EngineError, match=f"answered {status}") as caught:
            async with opened(url):
                pass
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("key", "is_named"),
    [("SOME_KEY", True), ("sk-abcdef0123456789", False), ("gsk_AbCdEf0123456789", False)],
)
async def test_a_key_in_place_of_its_variables_name_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, key: str, is_named: bool
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(InputError, match=r"engine\.api_key is not set") as caught:
        async with opened("http://127.0.0.1:9/v1", key):
            pass
    assert (key in caught.value.explained()) is is_named
