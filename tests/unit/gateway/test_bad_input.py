"""Every error reaches each vendor's client in its own format, and no Turn is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from swerl.core.chat import Finish
from swerl.core.errors import EngineError, EngineLostError, GatewayError
from swerl.core.turn import Completion, Sampling
from swerl.gateway import conversation as state
from swerl.gateway.bodies import read_object
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

ASK: Any = {"role": "user", "content": "fix it"}
LIMITS = SessionLimits(max_context_tokens=4000, max_body_bytes=40_000, model_call_s=0.3)


@dataclass
class LyingEngine(RecordingEngine):
    """A RecordingEngine that can answer with fewer log-probabilities than tokens."""

    lies: bool = False

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        if self.lies:
            self.lies = False
            return Completion((5, 6, 7), (-1.0,), Finish.STOP, "v1", len(ids))
        return await super().generate(ids, sampling, session)


@dataclass(frozen=True)
class Dialect:
    """The request format of one vendor's clients."""

    path: str
    messages: str
    """Field with the conversation."""
    call: Any
    result: Any
    types: Mapping[int, str]
    """Error type by status; every OpenAI error is of type `invalid_request_error` below 500."""

    def body(self, *messages: Any, **more: Any) -> dict[str, Any]:
        return {"model": "m", self.messages: list(messages or (ASK,)), **more}

    def reply(self, answer: Any) -> list[Any]:
        """Return an answer as the client sends it back."""
        if self.path.endswith("messages"):
            return [{"role": "assistant", "content": answer["content"]}]
        if self.path.endswith("completions"):
            return [answer["choices"][0]["message"]]
        return list(answer["output"])


OPENAI_TYPES = dict.fromkeys((400, 401, 404, 413), "invalid_request_error") | dict.fromkeys(
    (500, 503, 504), "server_error"
)
FUNCTION = {"name": "b", "arguments": "{}"}
DIALECTS = {
    "anthropic": Dialect(
        "/v1/messages",
        "messages",
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
        {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            500: "api_error",
            504: "timeout_error",
            529: "overloaded_error",
        },
    ),
    "openai-chat": Dialect(
        "/v1/chat/completions",
        "messages",
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}],
        },
        {"role": "tool", "tool_call_id": "a", "content": ""},
        OPENAI_TYPES,
    ),
    "openai-responses": Dialect(
        "/v1/responses",
        "input",
        {"type": "function_call", "call_id": "a", **FUNCTION},
        {"type": "function_call_output", "call_id": "a", "output": ""},
        OPENAI_TYPES,
    ),
}


@dataclass
class Talk:
    """A session with one recorded Turn."""

    dialect: Dialect
    engine: LyingEngine
    session: Session
    http: aiohttp.ClientSession
    said: list[Any] = field(default_factory=list)

    async def post(self, body: Any, *, path: str = "", key: str = "") -> tuple[int, Any, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.session.url + (path or self.dialect.path)
        headers = {"Authorization": f"Bearer {key or self.session.key}"}
        async with self.http.post(url, data=data, headers=headers) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def go_on(self) -> None:
        """Send the next user message and return the answer."""
        self.said.append(ASK)
        status, answer, _ = await self.post(self.dialect.body(*self.said))
        assert status == 200, answer
        self.said += self.dialect.reply(answer)


@pytest.fixture(params=DIALECTS)
async def talk(request: pytest.FixtureRequest) -> AsyncIterator[Talk]:
    engine = LyingEngine()
    async with (
        Gateway(engine=engine, family=engine.family) as gateway,
        aiohttp.ClientSession() as http,
    ):
        session = gateway.open("s", sampling=Sampling(100), limits=LIMITS)
        made = Talk(DIALECTS[request.param], engine, session, http)
        await made.go_on()
        yield made


BAD: Mapping[str, tuple[Callable[[Dialect], Any], int, str]] = {
    "malformed JSON": (lambda _: b'{"model": "m", ', 400, "not valid JSON"),
    "no UTF-8": (lambda _: b'{"model": "\xff"}', 400, "not valid JSON"),
    "no object": (lambda _: [1], 400, "must be a JSON object"),
    "nothing": (lambda _: b"", 400, "not valid JSON"),
    "no model": (lambda d: {d.messages: [ASK]}, 400, "model: Field required"),
    "no messages": (lambda d: d.body() | {d.messages: []}, 400, "at least one"),
    "messages of a wrong type": (lambda d: d.body() | {d.messages: 5}, 400, "valid array"),
    "a message of a wrong type": (lambda d: d.body(5), 400, "valid object"),
    "a role of a wrong type": (lambda d: d.body({"role": 5, "content": ""}), 400, "valid string"),
    "an unknown role": (lambda d: d.body({"role": "x", "content": ""}), 400, "'x' is n"),
    "content of a wrong type": (lambda d: d.body({"role": "user", "content": 5}), 400, "valid"),
    "tools of a wrong type": (lambda d: d.body(tools={}), 400, "tools: Input should be"),
    "a tool of a wrong type": (lambda d: d.body(tools=[5]), 400, "tools.0"),
    "stream of a wrong type": (lambda d: d.body(stream="yes"), 400, "stream: Input should be"),
    "a result without its call": (lambda d: d.body(ASK, d.result), 400, "answers no open"),
    "two open calls of one id": (lambda d: d.body(ASK, d.call, d.call, d.result), 400, "tool call"),
    "a call answered twice": (
        lambda d: d.body(ASK, d.call, d.result, d.result),
        400,
        "answers no open",
    ),
    "a context over the limit": (
        lambda d: d.body({"role": "user", "content": "a" * 8000}),
        400,
        "prompt is too long: ",
    ),
    "a body over the limit": (
        lambda d: d.body({"role": "user", "content": "a" * 50_000}),
        413,
        "larger than 40000 bytes",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_in_the_vendors_words_and_loses_nothing(
    talk: Talk, name: str
) -> None:
    make, status, words = BAD[name]

    got, answer, headers = await talk.post(make(talk.dialect))

    judge(talk.dialect, got, answer, headers)
    assert (got, words in answer["error"]["message"]) == (status, True), answer
    assert headers["x-should-retry"] == "false"
    await lost_nothing(talk)


async def test_an_id_may_come_again_once_its_call_is_answered(talk: Talk) -> None:
    dialect = talk.dialect
    messages = (ASK, dialect.call, dialect.result, dialect.call, dialect.result)

    status, answer, _ = await talk.post(dialect.body(*messages))

    assert status == 200, answer


@pytest.mark.parametrize(
    ("line", "status", "is_retried"),
    [
        (EngineLostError("connection refused"), 503, True),
        (EngineError("it answered 500"), 500, False),
        (RuntimeError("a bug"), 500, False),
    ],
)
async def test_an_engine_failure_is_reported_and_loses_nothing(
    talk: Talk, line: Exception, status: int, is_retried: bool
) -> None:
    talk.engine.lines = [line]

    got, answer, headers = await talk.post(talk.dialect.body({**ASK, "content": "and now?"}))

    judge(talk.dialect, got, answer, headers)
    overloaded = 529 if talk.dialect.path.endswith("messages") else 503
    assert got == (overloaded if status == 503 else status)
    assert ("retry-after" in headers) is is_retried
    assert isinstance(talk.session.failure, EngineError)
    await lost_nothing(talk)


async def test_a_completion_of_wrong_lengths_is_reported_and_not_trained(talk: Talk) -> None:
    talk.engine.lies = True

    got, answer, headers = await talk.post(talk.dialect.body({**ASK, "content": "and now?"}))

    judge(talk.dialect, got, answer, headers)
    assert got == 500
    assert "3 sampled ids but 1 log-probabilities" in answer["error"]["message"]
    await lost_nothing(talk)


async def test_a_slow_engine_times_out_and_loses_nothing(talk: Talk) -> None:
    talk.engine.gate = asyncio.Event()

    got, answer, headers = await talk.post(talk.dialect.body({**ASK, "content": "and now?"}))

    judge(talk.dialect, got, answer, headers)
    assert got == 504
    assert headers["x-should-retry"] == "false"
    talk.engine.gate = None
    talk.engine.abort_seen.clear()
    await lost_nothing(talk)


async def test_a_client_that_goes_away_loses_its_own_reply_only(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "RETRY_S", 0.0)
    talk.engine.started.clear()
    talk.engine.gate = asyncio.Event()
    asking = asyncio.create_task(talk.post(talk.dialect.body({**ASK, "content": "and now?"})))
    await talk.engine.started.wait()
    asking.cancel()
    await asyncio.wait({asking})
    await talk.engine.abort_seen.wait()
    talk.engine.gate = None
    talk.engine.abort_seen.clear()

    await lost_nothing(talk)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_request_without_an_open_session_is_refused(talk: Talk, is_closed: bool) -> None:
    turns = 1
    if is_closed:
        turns = len((await talk.session.close()).turns)

    got, answer, headers = await talk.post(talk.dialect.body(), key="" if is_closed else "sk-no")

    judge(talk.dialect, got, answer, headers)
    assert got == 401
    assert turns == len((await talk.session.close()).turns) == 1


async def test_a_path_that_is_not_served_is_refused_in_its_neighbours_words(talk: Talk) -> None:
    got, answer, headers = await talk.post({}, path=talk.dialect.path + "/compact")

    judge(talk.dialect, got, answer, headers)
    assert got == 404
    await lost_nothing(talk)


def judge(dialect: Dialect, status: int, answer: Any, headers: Any) -> None:
    """Check that an answer is an error in the vendor's format."""
    assert headers["Content-Type"] == "application/json"
    error = answer["error"]
    assert error["type"] == dialect.types[status]
    assert error["message"]
    if dialect.path.endswith("messages"):
        assert answer["type"] == "error"
    else:
        assert {"param", "code"} <= error.keys()


async def lost_nothing(talk: Talk) -> None:
    """Check that the conversation continues, and every token is trained."""
    await talk.go_on()
    trajectory = await talk.session.close()
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    first, second = trajectory.turns
    call = talk.engine.calls[-1]
    assert call.prompt == first.prompt_ids + first.output_ids + second.prompt_ids
    assert (call.output, call.logprobs) == (second.output_ids, second.logprobs)


CLASSES: Mapping[str, tuple[type[Exception], type[Exception]]] = {
    "invalid": (anthropic.BadRequestError, openai.BadRequestError),
    "context": (anthropic.BadRequestError, openai.BadRequestError),
    "key": (anthropic.AuthenticationError, openai.AuthenticationError),
    "path": (anthropic.NotFoundError, openai.NotFoundError),
    "size": (anthropic.ContentTooLargeError, openai.APIStatusError),
    "lost": (anthropic.OverloadedError, openai.InternalServerError),
    "broke": (anthropic.InternalServerError, openai.InternalServerError),
    "slow": (anthropic.GatewayTimeoutError, openai.InternalServerError),
}


@pytest.mark.parametrize("fault", CLASSES)
async def test_the_vendors_clients_raise_the_class_that_fits(fault: str) -> None:
    engine = RecordingEngine()
    fails: dict[str, Any] = {"lost": EngineLostError("gone"), "broke": EngineError("broke")}
    engine.lines = [fails[fault]] * 3 if fault in fails else []
    engine.gate = asyncio.Event() if fault == "slow" else None
    content = {"context": "a" * 8000, "size": "a" * 50_000}.get(fault, "hi")
    messages: Any = [] if fault == "invalid" else [{"role": "user", "content": content}]
    async with clients(engine, wrong_key=fault == "key", wrong_path=fault == "path") as (a, o):
        asked = (
            a.messages.create(model="m", max_tokens=5, messages=messages),
            o.chat.completions.create(model="m", messages=messages),
            o.responses.create(model="m", input=messages),
        )
        raised = await asyncio.gather(*asked, return_exceptions=True)

    for error, kind in zip(raised, (CLASSES[fault][0], *[CLASSES[fault][1]] * 2), strict=True):
        assert isinstance(error, kind), repr(error)


@asynccontextmanager
async def clients(
    engine: RecordingEngine, *, wrong_key: bool, wrong_path: bool
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, openai.AsyncOpenAI]]:
    """Yield the vendors' clients of one session, without retries."""
    async with Gateway(engine=engine, family=engine.family) as gateway:
        session = gateway.open("s", sampling=Sampling(100), limits=LIMITS)
        key = "wrong" if wrong_key else session.key
        url = session.url + ("/v1/messages/none" if wrong_path else "")
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as a,
            openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as o,
        ):
            yield a, o


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\ude00 cut", "\ufffd cut"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (rb"\ud83d\ude00", "\U0001f600"),
    ],
)
def test_a_lone_surrogate_becomes_the_replacement_character(written: bytes, read: str) -> None:
    assert read_object(bytearray(b'{"a": "' + written + b'"}'), "", 100) == {"a": read}


@pytest.mark.parametrize("body", [rb'{"a": "\ud83d}', rb'{"\ud83d": nan}', rb'{"a": "\x"}'])
def test_other_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError, match="not valid JSON"):
        read_object(bytearray(body), "", 100)
