"""Several gateway processes behind one address: same answers, same trees, and deaths survived."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swerl.core.chat import Message, Role
from swerl.core.contracts import EngineAddress
from swerl.core.errors import EngineError, GatewayError
from swerl.core.turn import Sampling
from swerl.gateway.intake import Bounds
from swerl.gateway.limits import SessionLimits
from swerl.gateway.pool import GatewayPool
from swerl.gateway.remote import RemoteSession
from swerl.gateway.sessions import TurnRecord
from tests.gateway._fakes import RecordingEngine
from tests.gateway._wire_engine import WireEngine, wired
from tests.gateway.test_app import PATHS, body, post
from tests.gateway.test_safety import http, told

HOST = b"\r\nHost: x\r\n"
WAIT_S = 60.0
"""Seconds after which a condition will not come true any more, on a machine that is busy."""


@pytest.fixture
async def wire() -> AsyncIterator[WireEngine]:
    async with wired(RecordingEngine()) as served:
        yield served


@pytest.fixture
async def deaths() -> asyncio.Queue[str]:
    return asyncio.Queue()


@pytest.fixture
async def pool(
    wire: WireEngine, tmp_path: Path, deaths: asyncio.Queue[str]
) -> AsyncIterator[GatewayPool]:
    setup = wire.setup(tmp_path)
    async with GatewayPool(setup, num_processes=2, on_death=deaths.put_nowait) as served:
        yield served


def opened(pool: GatewayPool, name: str = "s", **more: Any) -> RemoteSession:
    limits = SessionLimits(**more.pop("limits", {}))
    return pool.open(name, sampling=Sampling(1000), limits=limits, **more)


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # other processes set no event
            await asyncio.sleep(0.02)


def kill_server_of(session: RemoteSession) -> None:
    os.kill(session.worker.pid, signal.SIGKILL)


async def test_sessions_are_spread_and_their_trees_are_exact(
    pool: GatewayPool, wire: WireEngine
) -> None:
    wire.engine.lines = [Message(Role.ASSISTANT, word) for word in "abcdefgh"]
    sessions = [opened(pool, str(number)) for number in range(4)]
    for session in sessions:
        asked = said(f"fix {session.id}")
        _, first = await post(session, json=body(asked))
        again = {"role": "assistant", "content": first["content"]}
        await post(session, json=body(asked, again, said("go on")))

    trees = [await session.close() for session in sessions]

    assert {session.worker.number for session in sessions} == {0, 1}
    for number, tree in enumerate(trees):
        one, two = tree.turns
        calls = wire.engine.calls[2 * number : 2 * number + 2]
        assert (one.parent, two.parent) == (None, 0)
        assert calls[0].prompt == one.prompt_ids
        assert calls[1].prompt == one.prompt_ids + one.output_ids + two.prompt_ids
        assert [turn.output_ids for turn in tree.turns] == [call.output for call in calls]
        assert [turn.logprobs for turn in tree.turns] == [call.logprobs for call in calls]
    assert await sessions[0].close() is trees[0]


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/responses"])
async def test_one_connection_may_serve_keys_of_every_process(
    pool: GatewayPool, wire: WireEngine, path: str
) -> None:
    """A client that keeps connections, as a proxy before many agents does."""
    sessions = [opened(pool, str(number)) for number in range(4)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
        for turn in range(3):
            for session in sessions:
                sent = {"model": "m", "input": f"{turn}"} if path == "/v1/responses" else body()
                headers = {"Authorization": f"Bearer {session.key}"}
                async with client.post(pool.url + path, json=sent, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    assert answer.headers["Connection"] == "close"

    assert [len((await session.close()).turns) for session in sessions] == [3] * 4


async def test_a_head_in_pieces_and_a_large_body_reach_the_owner(
    pool: GatewayPool, wire: WireEngine
) -> None:
    sessions = [
        opened(pool, str(number), limits={"max_context_tokens": 10**7}) for number in (0, 1)
    ]
    for session in sessions:
        sent = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 10**6 + b'"}]}'
        raw = http(session, body=sent)
        answer = await told(session, raw[:7], raw[7:60], raw[60:200], raw[200:], until=b"never")
        assert answer.startswith(b"HTTP/1.1 200 ")

    assert [len(call.prompt) > 10**5 for call in wire.engine.calls] == [True, True]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /healthz HTTP/1.1" + HOST + b"\r\n", b"200"),
        (b"POST /v1/messages HTTP/1.1" + HOST + b"Content-Length: 2\r\n\r\n{}", b"401"),
        (b"GET /v1/models HTTP/1.1" + HOST + b"x-api-key: no\r\n\r\n", b"401"),
        (b"POST /generate HTTP/1.1" + HOST + b"Content-Length: 2\r\n\r\n{}", b"404"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"A" * 70_000, b"400"),
    ],
)  # fmt: skip
async def test_what_belongs_to_no_session_is_answered_too(
    pool: GatewayPool, raw: bytes, status: bytes
) -> None:
    session = opened(pool)
    answer = await told(session, raw, until=b"never")

    assert answer[9:12] == status, answer


async def test_a_socket_of_ones_own_goes_to_the_process_and_needs_no_key(
    pool: GatewayPool, wire: WireEngine
) -> None:
    sessions = [opened(pool, str(number)) for number in range(2)]
    for session in sessions:
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await session.attach(sock)
        assert sock.fileno() == -1, "the controller keeps no copy, or nobody would see its end"
        async with aiohttp.ClientSession() as client:
            for _ in range(2):
                async with client.post(url + "/v1/messages", json=body()) as answer:
                    assert answer.status == 200
                    assert "Connection" not in answer.headers

        assert len((await session.close()).turns) == 2
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(session, url=url, json=body())


async def test_turns_limits_and_failures_are_known_to_the_controller(
    pool: GatewayPool, wire: WireEngine
) -> None:
    records: list[TurnRecord] = []
    session = opened(pool, on_turn=records.append, limits={"max_turns": 1})
    wire.engine.lines = [Message(Role.ASSISTANT, "hello")]

    await post(session, json=body(said("hi")))
    await until(lambda: bool(records))
    status, _ = await post(session, json=body(said("more")))
    await until(lambda: bool(session.limit))
    tree = await session.close()

    assert status == 400
    assert session.limit == "max_turns"
    assert [record.turn for record in records] == list(tree.turns)
    assert records[0].reply.message.text == "hello"
    assert [message.text for message in records[0].new_messages] == ["hi"]


async def test_a_lost_engine_is_a_failure_here_too(pool: GatewayPool, wire: WireEngine) -> None:
    session = opened(pool)
    wire.engine.lines = [RuntimeError("the server answers 500")]

    status, _ = await post(session, json=body())
    await until(lambda: session.failure is not None)
    await session.close()

    assert status >= 500
    assert isinstance(session.failure, EngineError)


async def test_a_dead_process_loses_its_sessions_and_is_replaced(
    pool: GatewayPool, wire: WireEngine, deaths: asyncio.Queue[str]
) -> None:
    doomed, other = opened(pool, "doomed"), opened(pool, "other")
    for session in (doomed, other):
        await post(session, json=body())
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await doomed.attach(sock)
    before = doomed.worker

    kill_server_of(doomed)
    async with asyncio.timeout(WAIT_S):
        message = await deaths.get()
    lost = await doomed.close()

    assert "1 sessions were lost" in message
    assert isinstance(doomed.failure, GatewayError)
    assert lost.turns == ()
    assert lost.dropped == {"gateway process lost": len(wire.engine.calls[0].output)}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert (await post(other, json=body(said("still there?"))))[0] == 200
    assert len((await other.close()).turns) == 2
    assert other.failure is None
    await until(lambda: all(worker.ready.is_set() for worker in pool._workers))
    fresh = [opened(pool, str(number)) for number in range(2)]
    assert {session.worker.number for session in fresh} == {0, 1}
    assert before not in {session.worker for session in fresh}
    assert [(await post(session, json=body()))[0] for session in fresh] == [200, 200]


async def test_a_session_that_is_attached_or_closed_while_its_process_dies_ends(
    pool: GatewayPool,
) -> None:
    doomed = opened(pool)
    kill_server_of(doomed)

    with pytest.raises(GatewayError, match="died"):
        async with asyncio.timeout(WAIT_S):
            while True:
                await doomed.attach(socket.create_server(("127.0.0.1", 0)))

    assert (await doomed.close()).turns == ()
    assert isinstance(doomed.failure, GatewayError)


async def test_closing_the_pool_closes_sessions_and_leaves_no_process(
    wire: WireEngine, tmp_path: Path
) -> None:
    async with GatewayPool(wire.setup(tmp_path), num_processes=2) as pool:
        session = opened(pool)
        await post(session, json=body())
        running = [worker.pid for worker in pool._workers]

    assert len((await session.close()).turns) == 1
    assert not [pid for pid in running if _lives(pid)]
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(session, json=body())


async def test_each_process_has_its_own_bound_on_requests(wire: WireEngine, tmp_path: Path) -> None:
    wire.engine.gate = asyncio.Event()
    setup = wire.setup(tmp_path, bounds=Bounds(most_at_work=1, most_waiting=0))
    async with GatewayPool(setup, num_processes=2) as pool:
        sessions = [opened(pool, str(number)) for number in range(2)]
        busy = [asyncio.create_task(post(session, json=body())) for session in sessions]
        await until(lambda: len(wire.engine.calls) == 2)
        refused = [(await post(session, json=body(said("2"))))[0] for session in sessions]
        wire.engine.gate.set()

        assert refused == [529, 529]
        assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]


async def test_an_engine_that_is_not_there_is_one_clear_error(
    wire: WireEngine, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    setup = wire.setup(tmp_path)
    gone = EngineAddress("sglang", {"url": f"http://127.0.0.1:{port}"})
    pool = GatewayPool(
        type(setup)(gone, "tiny", None, "m", setup.history, tmp_path), num_processes=2
    )

    with pytest.raises(GatewayError, match=str(port)):
        async with pool:
            pass


async def test_processes_die_with_a_controller_that_is_killed(
    wire: WireEngine, tmp_path: Path
) -> None:
    program = f"""
import asyncio
from pathlib import Path
from swerl.gateway.orders import WorkerSetup
from swerl.gateway.pool import GatewayPool
from swerl.gateway.speakers import HistoryPolicy
from swerl.core.contracts import EngineAddress

async def main():
    engine = EngineAddress("sglang", {{"url": {wire.url!r}}})
    setup = WorkerSetup(engine, "tiny", None, "m", HistoryPolicy.EXACT, Path({str(tmp_path)!r}))
    async with GatewayPool(setup, num_processes=2) as pool:
        print(*(worker.pid for worker in pool._workers), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    command = (sys.executable, "-c", program)
    controller = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert controller.stdout
    async with asyncio.timeout(WAIT_S):
        running = [int(pid) for pid in (await controller.stdout.readline()).split()]
    controller.kill()
    await controller.wait()

    assert len(running) == 2
    await until(lambda: not any(_lives(pid) for pid in running))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
