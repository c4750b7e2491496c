"""The vendors' own clients with all their helpers: tool runners, parsing, streams, retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic import beta_async_tool

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.errors import EngineError
from swerl.gateway import conversation as state
from swerl.gateway import router
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

HI: Any = [{"role": "user", "content": "hi"}]


class City(pydantic.BaseModel):
    """The type of a parsed reply."""

    name: str
    people: int


@pytest.fixture
async def claude(session: Session) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key) as made:
        made._calculate_retry_timeout = lambda *_, **__: 0.0  # type: ignore[method-assign]
        yield made


@pytest.fixture
async def gpt(session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=session.url + "/v1", api_key=session.key) as made:
        made._calculate_retry_timeout = lambda *_, **__: 0.0  # type: ignore[method-assign]
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_runner_works_to_the_end_in_one_chain(
    engine: RecordingEngine, claude: anthropic.AsyncAnthropic, session: Session, stream: bool
) -> None:
    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    engine.lines = [
        Message(Role.ASSISTANT, "", "Two sums.", (_sum("1", "2"), _sum("3", "4"))),
        Message(Role.ASSISTANT, "", "", (_sum("x", "4"), ToolCall("", "fly", {}))),
        Message(Role.ASSISTANT, "Ten."),
    ]
    runner: Any = claude.beta.messages.tool_runner(
        model="m", max_tokens=900, messages=HI, tools=[add], stream=stream
    )
    async for one in runner:
        last = await one.get_final_message() if stream else one

    assert last.content[-1].text == "Ten."
    heard = engine.family.text(engine.calls[1].prompt)
    assert "\n3\n" in heard and "\n7\n" in heard
    turns = (await session.close()).turns
    assert [turn.parent for turn in turns] == [None, 0, 1]


def _sum(a: str, b: str) -> ToolCall:
    return ToolCall("", "add", {"a": a, "b": b})


async def test_anthropics_stream_helpers_separate_text_thinking_and_calls(
    engine: RecordingEngine, claude: anthropic.AsyncAnthropic
) -> None:
    engine.lines = [Message(Role.ASSISTANT, "Hello é.", "Hm.", (_sum("1", "2"),))]
    told: dict[str, list[Any]] = {}
    async with claude.messages.stream(model="m", max_tokens=900, messages=HI) as stream:
        async for event in stream:
            told.setdefault(event.type, []).append(event)
    async with claude.messages.stream(model="m", max_tokens=900, messages=HI) as stream:
        text = "".join([piece async for piece in stream.text_stream])

    assert told["text"][-1].snapshot == "Hello é."
    assert told["thinking"][-1].snapshot == "Hm."
    assert told["input_json"][-1].snapshot == {"a": "1", "b": "2"}
    assert text == "Done."


async def test_calls_are_parsed_into_the_clients_types(
    engine: RecordingEngine, gpt: openai.AsyncOpenAI
) -> None:
    engine.lines = [
        Message(Role.ASSISTANT, tool_calls=(ToolCall("", "City", {"name": "Ulm", "people": "1"}),))
    ] * 2
    chat_tool = openai.pydantic_function_tool(City)
    tool: Any = {"type": "function", "strict": True, **chat_tool["function"]}

    chat = await gpt.chat.completions.parse(model="m", messages=HI, tools=[chat_tool])
    async with gpt.responses.stream(model="m", input="hi", tools=[tool]) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()

    calls = chat.choices[0].message.tool_calls
    assert calls and calls[0].function.parsed_arguments == City(name="Ulm", people=1)
    assert response.output[0].arguments == '{"name":"Ulm","people":1}'  # type: ignore[union-attr]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


async def test_a_failure_after_the_first_ping_is_the_clients_own_exception(
    engine: RecordingEngine,
    claude: anthropic.AsyncAnthropic,
    gpt: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "PING_S", 0.01)
    engine.gate = asyncio.Event()
    engine.lines = [EngineError("broke")] * 3

    async def by_claude() -> None:
        async with claude.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
            await stream.get_final_message()

    async def by_chat() -> None:
        stream = await gpt.chat.completions.create(model="m", messages=HI, stream=True)
        _ = [chunk async for chunk in stream]

    async def by_responses() -> None:
        async with gpt.responses.stream(model="m", input="hi") as stream:
            await stream.get_final_response()

    asked = [asyncio.create_task(one()) for one in (by_claude, by_chat, by_responses)]
    await asyncio.sleep(0.1)
    engine.gate.set()
    failures = await asyncio.gather(*asked, return_exceptions=True)

    assert isinstance(failures[0], anthropic.APIError)
    assert all(isinstance(one, openai.APIError) for one in failures[1:])
    assert all("broke" in str(one) for one in failures)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_gave_up_waiting_gets_the_same_reply_when_it_asks_again(
    engine: RecordingEngine,
    claude: anthropic.AsyncAnthropic,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    monkeypatch.setattr(state, "RETRY_S", 5.0)
    engine.gate = asyncio.Event()
    patient = claude.with_options(timeout=0.1, max_retries=5)
    patient._calculate_retry_timeout = lambda *_, **__: 0.0  # type: ignore[method-assign]
    asking = asyncio.create_task(
        patient.messages.create(model="m", max_tokens=9, messages=HI, stream=stream)
    )
    await asyncio.sleep(0.15)
    engine.gate.set()
    reply: Any = await asking
    if stream:
        _ = [event async for event in reply]

    trajectory = await session.close()
    assert len(engine.calls) == len(trajectory.turns) == 1
    assert trajectory.dropped == {}


async def test_openais_client_names_each_request(gpt: openai.AsyncOpenAI) -> None:
    chat = await gpt.chat.completions.create(model="m", messages=HI)
    response = await gpt.responses.create(model="m", input="hi")
    stream = await gpt.responses.create(model="m", input="hi", stream=True)
    streamed = stream.response.headers["x-request-id"]
    await stream.close()
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.chat.completions.create(model="m", messages=HI, n=2)

    assert_distinct(chat._request_id, response._request_id, streamed, caught.value.request_id)


def assert_distinct(*names: str | None) -> None:
    assert all(name and name.startswith("req_") for name in names)
    assert len(set(names)) == len(names)
