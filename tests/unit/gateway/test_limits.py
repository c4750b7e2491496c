"""Admission: requests above the limit wait in turn, then must retry."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import pytest

from swerl.core.chat import Message, Role
from swerl.core.errors import GatewayError
from swerl.core.events import GatewayLoad
from swerl.core.turn import Completion, Sampling
from swerl.gateway import server
from swerl.gateway.limits import GatewayAdmission, GatewayLimits, SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine

HELD_S = 0.1


class SlowEngine(RecordingEngine):
    """Waits before each reply; replies overlap."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        await asyncio.sleep(HELD_S)
        return await super().generate(ids, sampling, session)


async def hold(
    admission: GatewayAdmission, name: str, entered: list[str], gate: asyncio.Event
) -> None:
    async with admission.slot():
        entered.append(name)
        await gate.wait()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_waits_no_longer_than_the_limit() -> None:
    admission, gate = GatewayAdmission(GatewayLimits(1, wait_s=0.01)), asyncio.Event()
    holder = asyncio.create_task(hold(admission, "first", [], gate))
    await settle()

    with pytest.raises(GatewayError) as refused:
        await hold(admission, "second", [], gate)
    gate.set()
    await holder

    assert refused.value.retryable
    assert admission.num_waiting == 0


@pytest.mark.parametrize(("path", "busy"), [("/v1/messages", 529), ("/v1/chat/completions", 503)])
async def test_twice_the_load_ends_in_answers_or_refusals_and_loses_no_turn(
    path: str, busy: int
) -> None:
    """Eight active and four waiting requests, and twice as many clients."""
    engine = SlowEngine()
    limits = GatewayLimits(most_active=8, most_waiting=4, wait_s=10)
    statuses: Counter[int] = Counter()
    retry_after: set[str | None] = set()
    seconds: list[float] = []

    async def ask(session: Session, http: aiohttp.ClientSession, number: int) -> None:
        headers = {"Authorization": f"Bearer {session.key}"}
        message = {"role": "user", "content": f"{number}"}
        more = {"metadata": {"user_id": "x" * 200_000}}  # more than is read of one that waits
        sent = {"model": "m", "max_tokens": 50, "messages": [message], **more}
        began = time.monotonic()
        async with http.post(session.url + path, json=sent, headers=headers) as response:
            answer = await response.json()
        statuses[response.status] += 1
        if response.status == 200:
            seconds.append(time.monotonic() - began)
        else:
            retry_after.add(response.headers.get("retry-after"))
            assert answer["error"]["message"]

    async with Gateway(engine=engine, family=engine.family, limits=limits) as gateway:
        opened = [
            gateway.open(str(n), sampling=Sampling(50), limits=SessionLimits()) for n in range(12)
        ]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            for burst in range(3):
                wave = [ask(session, http, burst) for session in opened for _ in range(2)]
                await asyncio.gather(*wave)
        trajectories = [await session.close() for session in opened]

    assert set(statuses) == {200, busy}
    assert statuses[200] >= 3 * 12
    assert retry_after == {"1"}
    assert sum(len(one.turns) for one in trajectories) == statuses[200] == len(engine.calls)
    assert all(not one.dropped for one in trajectories)
    assert max(seconds) < 10 + HELD_S + 5, "the bound on waiting, a reply, and a busy machine"


async def test_event_loop_lag_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LAG_SAMPLE_S", 0.01)
    monkeypatch.setattr(server, "LOAD_REPORT_S", 0.05)
    told, engine = asyncio.Queue[GatewayLoad](), RecordingEngine(lines=[Message(Role.ASSISTANT)])
    served = Gateway(engine=engine, family=engine.family, on_load=told.put_nowait)
    async with served as gateway:
        gateway.open("s", sampling=Sampling(9), limits=SessionLimits())
        await told.get()
        time.sleep(0.2)  # noqa: ASYNC251  # the stall that is measured
        stalled = await told.get()
        calm = [await told.get() for _ in range(3)]

    assert stalled.lag_s >= 0.15
    assert stalled.sessions == 1
    assert min(load.lag_s for load in calm) < stalled.lag_s
