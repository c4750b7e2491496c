"""The gateway over HTTP: keys, limits, errors, lost replies, callbacks, pages beside chat."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import aiohttp
import pytest
from yarl import URL

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.errors import EngineError, EngineLostError, GatewayError, InputError
from swerl.core.events import GatewayLoad
from swerl.core.turn import Sampling
from swerl.gateway import router, server, sessions
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession, open_in

ASK = {"role": "user", "content": "fix it"}
PATHS = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 500, "messages": list(messages or (ASK,)), **more}


async def post(
    session: Session, path: str = PATHS["anthropic"], *, url: str = "", **sent: Any
) -> tuple[int, Any]:
    headers = {"x-api-key": session.key, "Authorization": f"Bearer {session.key}"}
    headers |= sent.pop("headers", {})
    async with aiohttp.ClientSession() as http:
        target = (url or session.url) + path
        async with http.post(target, headers=headers, **sent) as response:
            return response.status, await response.json(content_type=None)


async def test_sessions_see_nothing_of_each_other(
    engine: RecordingEngine, open_session: OpenSession
) -> None:
    one, two = open_session("one"), open_session("two")
    _, said = await post(one, json=body())
    await post(two, json=body(ASK, {"role": "assistant", "content": said["content"]}, ASK))

    turns = (await two.close()).turns
    assert [turn.parent for turn in turns] == [None]
    assert engine.calls[1].session == "two"


async def test_a_prompt_over_the_context_stops_an_agent_that_makes_no_room(
    open_session: OpenSession,
) -> None:
    session = open_session(max_context_tokens=60)
    long = body({"role": "user", "content": "x" * 100})
    status, answer = await post(session, json=long)
    _, openai_answer = await post(session, PATHS["openai"], json=long)
    assert status == 400
    assert answer["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 119 tokens > 59 maximum",
    }
    assert openai_answer["error"]["code"] == "context_length_exceeded"
    assert session.limit == "max_context_tokens"
    status, _ = await post(session, json=body({"role": "user", "content": "x"}))
    assert (status, session.limit) == (200, "")


async def test_turns_are_capped_and_a_failed_call_costs_none(
    engine: RecordingEngine, open_session: OpenSession
) -> None:
    engine.lines = [EngineLostError("gone"), Message(Role.ASSISTANT, "one")]
    session = open_session(max_turns=1)
    statuses = [(await post(session, json=body()))[0] for _ in range(3)]
    assert statuses == [529, 200, 400]
    assert session.limit == "max_turns"
    assert len((await session.close()).turns) == 1


async def test_an_agent_in_a_loop_is_stopped(open_session: OpenSession) -> None:
    session = open_session(requests_per_minute=2)

    answers = [await post(session, json=body()) for _ in range(3)]
    assert [status for status, _ in answers] == [200, 200, 400]
    assert "loop" in answers[2][1]["error"]["message"]
    assert session.limit == "requests_per_minute"


async def test_the_client_may_lower_the_reply_length(
    engine: RecordingEngine, open_session: OpenSession
) -> None:
    session = open_session(sampling=Sampling(200, seed=5), max_context_tokens=120)
    await post(session, json=body())
    await post(session, json=body(max_tokens=3))

    first, second = (call.sampling for call in engine.calls)
    assert first.max_new_tokens == 120 - len(engine.calls[0].prompt)
    assert second.max_new_tokens == 3
    assert first.stop_token_ids == engine.family.stop_ids
    assert first.seed != second.seed


async def test_pings_keep_a_streaming_client_waiting_and_late_errors_are_events(
    engine: RecordingEngine, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "PING_S", 0.02)
    engine.gate = asyncio.Event()
    engine.lines = [EngineError("broke")]
    session = open_session()
    headers = {"x-api-key": session.key}
    url = session.url + PATHS["anthropic"]
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body(stream=True), headers=headers) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        engine.gate.set()
        rest = await response.read()
    assert first == b": ping\n\n"
    assert rest.lstrip(b": ping\n").startswith(b"event: error\ndata: {")
    assert b"api_error" in rest


async def test_an_attached_socket_serves_its_session_alone_without_a_key(
    engine: RecordingEngine, open_session: OpenSession
) -> None:
    session, other = open_session("inside"), open_session("other")
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await session.attach(sock)
    for headers in ({}, {"x-api-key": "anything"}, {"x-api-key": other.key}):
        status, _ = await post(session, url=url, json=body(), headers=headers)
        assert status == 200
    assert {call.session for call in engine.calls} == {"inside"}
    assert session.endpoint(url + "/").url == url
    await session.close()
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(session, url=url, json=body())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/", 200),
        ("HEAD", "/api/hello", 200),
        ("GET", "/", 200),
        ("GET", "/healthz", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/flush_cache", 404),
        ("POST", "/update_weights_from_disk", 404),
        ("GET", "/v1/messages", 404),
    ],
)
async def test_checks_are_answered_and_nothing_else_is_reachable(
    gateway: Gateway, method: str, path: str, status: int
) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, gateway.url + path) as response,
    ):
        assert response.status == status


@pytest.mark.parametrize(
    ("host", "reason", "hint"),
    [
        ("127.0.0.1", "Address already in use$", "port to 0"),
        ("192.0.2.7", "", "address of this machine"),
        ("999.1.1.1", "", "address of this machine"),
    ],
)
async def test_a_taken_port_or_another_machines_address_is_one_clear_error(
    gateway: Gateway, engine: RecordingEngine, host: str, reason: str, hint: str
) -> None:
    port = int(gateway.url.rsplit(":", 1)[1])
    with pytest.raises(GatewayError, match=f"cannot listen on {host}:{port}: {reason}") as caught:
        async with Gateway(engine=engine, family=engine.family, host=host, port=port):
            pass
    assert hint in caught.value.hint


async def test_on_turn_gets_the_messages_of_each_turn(
    gateway: Gateway, engine: RecordingEngine
) -> None:
    call = ToolCall("", "bash", {"cmd": "ls"})
    engine.lines = [Message(Role.ASSISTANT, "I look.", tool_calls=(call,))]
    told: list[Any] = []
    session = gateway.open("s", sampling=Sampling(500), limits=SessionLimits(), on_turn=told.append)
    await post(session, json=body())
    assert told[0].new_messages == (Message(Role.USER, "fix it"),)
    assert told[0].reply.message.text == "I look."
    assert told[0].turn == (await session.close()).turns[0]


async def test_more_requests_than_slots_wait_their_turn(
    engine: RecordingEngine, open_session: OpenSession
) -> None:
    engine.gate = asyncio.Event()
    session = open_session(max_concurrency=2)
    asking = [
        asyncio.create_task(post(session, json=body({"role": "user", "content": f"sub {n}"})))
        for n in range(5)
    ]
    await asyncio.sleep(0.1)
    assert len(engine.calls) == 2

    engine.gate.set()
    assert [(await one)[0] for one in asking] == [200] * 5
    assert len((await session.close()).turns) == 5


async def test_an_idle_connection_does_not_hold_up_the_close(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A close that waits for idle ones never ends.
    monkeypatch.setattr(sessions, "_SHUTDOWN_S", 600.0)
    session = open_session()
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await session.attach(sock)
    async with aiohttp.ClientSession() as http:
        async with http.post(url + PATHS["anthropic"], json=body()) as response:
            await response.read()

        async with asyncio.timeout(30):
            trajectory = await session.close()
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "sk-swerl-guess"}])
async def test_a_gateway_on_a_shared_address_requires_a_session_key(
    engine: RecordingEngine, headers: dict[str, str]
) -> None:
    async with Gateway(engine=engine, family=engine.family, host="0.0.0.0") as gateway:
        session = gateway.open("s", sampling=Sampling(max_new_tokens=9), limits=SessionLimits())
        assert gateway.url.startswith("http://127.0.0.1:")
        async with aiohttp.ClientSession(gateway.url, headers=headers) as http:
            asked = [http.post(path, json=body()) for path in PATHS.values()]
            for asking in (*asked, http.get("/v1/models")):
                async with asking as refused:
                    assert refused.status == 401
        assert not engine.calls
        assert (await post(session, json=body()))[0] == 200


async def test_on_refused_is_called_for_each_error(engine: RecordingEngine) -> None:
    told: list[tuple[str, str]] = []

    def note(session: str, error: Exception) -> None:
        told.append((session, str(error)))

    async with Gateway(engine=engine, family=engine.family, on_refused=note) as gateway:
        session = gateway.open("s", sampling=Sampling(9), limits=SessionLimits())
        await post(session, json={"model": "m"})
        await session.close()
        await post(session, json=body())
    assert told == [("s", "messages: Field required"), ("", told[1][1])]
    assert "no open session" in told[1][1]


async def test_a_session_id_is_open_once(open_session: OpenSession) -> None:
    session = open_session("same")
    with pytest.raises(GatewayError, match="already open"):
        open_session("same")
    await session.close()
    open_session("same")


async def test_a_failing_on_turn_callback_holds_no_slot(
    gateway: Gateway, engine: RecordingEngine
) -> None:
    def broken(record: TurnRecord) -> None:
        raise OSError("no space left on device")

    limits = SessionLimits(max_concurrency=1)
    session = gateway.open("s", sampling=Sampling(100), limits=limits, on_turn=broken)
    for number in range(3):
        await post(session, json=body({"role": "user", "content": str(number)}))
    assert not session.conversation.answers
    assert len((await session.close()).turns) == 3


async def test_a_conversation_that_the_chat_template_refuses_is_the_clients_mistake(
    engine: RecordingEngine, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object) -> list[int]:
        message = "no user query found"
        raise InputError(message)

    monkeypatch.setattr(engine.family, "render", refuse)
    status, answer = await post(open_session(), json=body())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "no user query" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/m", 200),
        ("/v1/models/org/m", 200),
        ("/v1/models/..", 404),
        ("/v1/modelsx", 404),
    ],
)
async def test_any_model_name_has_a_page(open_session: OpenSession, path: str, status: int) -> None:
    session = open_session()
    headers = {"x-api-key": session.key}
    url = URL(session.url + path, encoded=True)
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url) as response:
        assert response.status == status
        answer = await response.json()
    if status == 200:
        assert answer["id"] == path.removeprefix("/v1/models/")
        assert (answer["type"], answer["object"]) == ("model", "model")


async def test_event_loop_lag_is_reported(
    engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LAG_SAMPLE_S", 0.01)
    monkeypatch.setattr(server, "LOAD_REPORT_S", 0.05)
    told = asyncio.Queue[GatewayLoad]()
    served = Gateway(engine=engine, family=engine.family, on_load=told.put_nowait)
    async with served as gateway:
        open_in(gateway)
        await told.get()
        time.sleep(0.2)  # noqa: ASYNC251  # the stall that is measured
        stalled = await told.get()
        calm = [await told.get() for _ in range(3)]
    assert stalled.lag_s >= 0.15
    assert stalled.sessions == 1
    assert min(load.lag_s for load in calm) < stalled.lag_s
