"""Closing a session."""

from __future__ import annotations

import asyncio

from swerl.core.turn import Sampling
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession
from tests.unit.gateway.test_server import body, post


async def test_a_session_can_be_closed_twice_at_once(
    engine: RecordingEngine, open_session: OpenSession
) -> None:
    engine.gate = asyncio.Event()
    session = open_session()
    asking = asyncio.create_task(post(session, json=body()))
    await engine.started.wait()

    one, two = await asyncio.gather(session.close(), session.close())

    assert one is two
    assert one.dropped == {"aborted": 2}
    assert (await asking)[0] >= 400


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
