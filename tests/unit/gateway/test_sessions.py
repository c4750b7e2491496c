"""A callback of a Session that fails."""

from __future__ import annotations

from swerl.core.turn import Sampling
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.test_server import body, post


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
