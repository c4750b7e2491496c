"""Servers that run but answer nothing: each is a process that a test stops by SIGSTOP.

The fake speaks SGLang's contract; test_weight_sync_sglang.py stops the real one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from swerl.core.turn import Sampling
from swerl.engines import _sglang_pool, sglang
from swerl.engines._sglang_client import HttpEngine
from tests.unit.engines import _launched
from tests.unit.engines._fake_python import fake_python, process_at
from tests.unit.engines._launched import ref, setup

pytestmark = pytest.mark.integration

LONG = Sampling(900)
until = partial(_launched.until, limit_s=120)


@pytest.fixture(autouse=True)
def _watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.2)
    monkeypatch.setattr(_sglang_pool, "WATCH_S", 1.0)


def options(tmp_path: Path, servers: int) -> sglang.Options:
    return sglang.Options(
        python=fake_python(tmp_path), servers=servers, restarts=9, start_timeout_s=120
    )


def running(engine: HttpEngine) -> bool:
    return bool(engine._flights)


async def test_a_hung_server_is_replaced_and_its_requests_answered_by_the_right_weights(
    tmp_path: Path,
) -> None:
    notices: list[str] = []
    async with sglang.open(options(tmp_path, 2), setup(tmp_path, notices)) as engine:
        await engine.load(ref(tmp_path, "v1"))
        sessions = [f"s{n}" for n in range(4)]
        asked = [asyncio.create_task(engine.generate([5], LONG, name)) for name in sessions]
        await until(lambda: running(engine))
        hung = process_at(engine.pool.servers[0].url)
        hung.suspend()
        async with asyncio.timeout(120):
            replies = await asyncio.gather(*asked)
        assert {reply.weight_version for reply in replies} == {"v1"}
        assert len({reply.ids for reply in replies}) == 1  # the fake's tokens follow the prompt
        await until(lambda: len(engine.pool.in_use()) == 2)
        assert not hung.is_running()
        replies = [await engine.generate([7], Sampling(3), name) for name in sessions]
        assert {reply.weight_version for reply in replies} == {"v1"}
    assert "ran but did not answer; restarting it (1 of 9)" in notices[0]
