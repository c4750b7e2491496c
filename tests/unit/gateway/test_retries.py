"""A client's retry is answered once; an equal request of another client gets its own reply."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from random import Random

import aiohttp
import pytest

from swerl.core.chat import ChatReply, ChatRequest, Message, Role
from swerl.core.turn import Completion, Sampling
from swerl.gateway import conversation as state
from swerl.gateway.conversation import Conversation, Requester, read_requester
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession, conversation_with
from tests.unit.gateway.test_safety import http

ASK = Message(Role.USER, "fix it")
UNNAMED, NAMED, AGAIN = Requester(), Requester("agent-7"), Requester(is_retry=True)


async def ask(
    conversation: Conversation, requester: Requester = UNNAMED, text: str = ""
) -> ChatReply:
    request = ChatRequest((Message(Role.USER, text) if text else ASK,))
    async with conversation.answer(request, requester) as answer:
        reply = await answer.reply()
        answer.delivered()
        return reply


async def leave(asking: asyncio.Task[ChatReply]) -> None:
    asking.cancel()
    await asyncio.wait({asking})


@pytest.mark.parametrize("requester", [UNNAMED, NAMED, AGAIN])
async def test_a_retry_gets_the_pending_reply_of_the_request_that_left(
    engine: RecordingEngine, requester: Requester
) -> None:
    engine.gate = asyncio.Event()
    conversation = conversation_with(engine, max_turns=1)
    first = asyncio.create_task(ask(conversation, requester))
    await engine.started.wait()
    await leave(first)
    again = asyncio.create_task(ask(conversation, requester))
    await asyncio.sleep(0)
    engine.gate.set()
    assert (await again).message.text == "Done."
    trajectory = await conversation.close()
    assert (len(engine.calls), len(trajectory.turns), trajectory.dropped) == (1, 1, {})


@pytest.mark.parametrize(
    ("requester", "other", "num"),
    [
        (UNNAMED, UNNAMED, 2),
        (UNNAMED, Requester("agent-8"), 2),
        (NAMED, NAMED, 1),
        (AGAIN, AGAIN, 1),
    ],
)
async def test_equal_requests_at_once_share_a_reply_only_if_one_is_surely_a_retry(
    engine: RecordingEngine, requester: Requester, other: Requester, num: int
) -> None:
    engine.gate = asyncio.Event()
    conversation = conversation_with(engine)
    both = [asyncio.create_task(ask(conversation, one)) for one in (requester, other)]
    await asyncio.sleep(0.01)
    engine.gate.set()
    one, two = await asyncio.gather(*both)
    assert (one is two) is (num == 1)
    assert len(engine.calls) == num
    assert [turn.parent for turn in (await conversation.close()).turns] == [None] * num


async def test_a_delivered_reply_is_given_again_only_to_a_marked_retry(
    engine: RecordingEngine,
) -> None:
    conversation = conversation_with(engine)
    first = await ask(conversation)
    assert await ask(conversation, AGAIN) is first
    assert await ask(conversation) is not first
    assert len((await conversation.close()).turns) == len(engine.calls) == 2


async def test_a_reply_without_a_retry_is_aborted_and_frees_its_slot(
    engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "RETRY_S", 0)
    engine.gate = asyncio.Event()
    conversation = conversation_with(engine, max_concurrency=1, max_turns=1)
    first = asyncio.create_task(ask(conversation))
    await engine.started.wait()
    await leave(first)
    await engine.abort_seen.wait()
    await asyncio.sleep(0.01)
    engine.abort_seen.clear()
    engine.gate.set()
    await ask(conversation)
    trajectory = await conversation.close()
    assert len(trajectory.turns) == 1
    assert trajectory.dropped == {"aborted": 2}


async def test_few_delivered_replies_are_kept(engine: RecordingEngine) -> None:
    conversation = conversation_with(engine)
    first = await ask(conversation, text="0")
    for number in range(1, 80):
        last = await ask(conversation, text=str(number))
    assert len(conversation._duplicates.delivered) == len(conversation._duplicates.answers) == 32
    assert await ask(conversation, AGAIN, "79") is last
    assert await ask(conversation, AGAIN, "0") is not first


async def test_tokens_of_lost_replies_count_towards_the_cap(engine: RecordingEngine) -> None:
    conversation = conversation_with(engine, max_sampled_tokens=6)
    async with conversation.answer(ChatRequest((ASK,))) as answer:
        await answer.reply()

    with pytest.raises(Exception, match="used up its 6 sampled tokens"):
        await ask(conversation, text="else")
    assert conversation.admission.reached == "max_sampled_tokens"


@pytest.mark.parametrize(
    ("headers", "requester"),
    [
        ({}, Requester()),
        ({"x-stainless-retry-count": "0"}, Requester()),
        ({"x-stainless-retry-count": "2"}, Requester("", is_retry=True)),
        ({"x-claude-code-agent-id": "a"}, Requester("a")),
        ({"thread-id": "t"}, Requester("t")),
        ({"Idempotency-Key": "k"}, Requester("k", is_retry=True)),
    ],
)
def test_the_requester_is_read_from_headers(headers: dict[str, str], requester: Requester) -> None:
    assert read_requester(headers) == requester


class HurriedEngine(RecordingEngine):
    """Waits a moment before each reply; ignores aborts."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        await asyncio.sleep(len(self.calls) % 5 / 1000)
        return await super().generate(ids, sampling, session)

    async def abort(self, session: str) -> None:
        self.aborted.append(session)


@pytest.mark.parametrize("seed", range(4))
async def test_clients_that_come_and_go_lose_no_token_uncounted(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(state, "RETRY_S", 0.003)
    random = Random(seed)
    engine = HurriedEngine()
    received: set[str] = set()

    async def hurry(session: Session, name: str) -> None:
        """Send requests with short timeouts, and continue from each answer."""
        said = [{"role": "user", "content": f"do {random.randrange(3)}"}]
        headers = {"x-api-key": session.key, "thread-id": name}
        async with aiohttp.ClientSession(session.url, headers=headers) as client:
            for _ in range(12):
                body = {"model": "m", "messages": said, "stream": False}
                patience = aiohttp.ClientTimeout(total=random.choice([0.001, 0.004, 1]))
                try:
                    async with client.post("/v1/messages", json=body, timeout=patience) as got:
                        reply = await got.json()
                except (TimeoutError, aiohttp.ClientError):
                    continue
                received.add(reply["id"])
                said = [*said, {"role": "assistant", "content": reply["content"]}, *said[:1]]

    async with Gateway(engine=engine, family=engine.family) as gateway:
        told: list[str] = []
        session = gateway.open(
            "s",
            sampling=Sampling(40),
            limits=SessionLimits(),
            on_turn=lambda record: told.append(f"msg_{record.reply.id}"),
        )
        await asyncio.gather(*(hurry(session, name) for name in ("", "", "a", "b")))
        trajectory = await session.close()

    num_sampled = sum(len(call.output) for call in engine.calls)
    assert trajectory.num_sampled_tokens + sum(trajectory.dropped.values()) == num_sampled
    assert received <= set(told)
    assert len(told) == len(set(told)) == len(trajectory.turns)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # what it waits for is in the gateway's own state
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("rude", "num_calls"), [(True, 1), (False, 2)])
async def test_a_reply_whose_connection_broke_unread_is_given_again(
    engine: RecordingEngine, open_session: OpenSession, rude: bool, num_calls: int
) -> None:
    session = open_session()
    first = await _connect(session)
    await asyncio.get_running_loop().sock_recv(first, 1 if rude else 65536)
    if rude:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    first.close()
    await asyncio.sleep(0.02)

    with await _connect(session) as second:
        await asyncio.get_running_loop().sock_recv(second, 65536)
    assert len(engine.calls) == num_calls
    assert len((await session.close()).turns) == num_calls


async def _connect(session: Session) -> socket.socket:
    """Send a request over a new connection."""
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", int(session.url.rsplit(":", 1)[1])))
    await loop.sock_sendall(sock, http(session))
    return sock
