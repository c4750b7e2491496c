"""The gateway reports how long its event loop was blocked."""

from __future__ import annotations

import asyncio
import time

import pytest

from swerl.core.chat import Message, Role
from swerl.core.events import GatewayLoad
from swerl.core.turn import Sampling
from swerl.gateway import server
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from tests.unit.gateway._fakes import RecordingEngine


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
