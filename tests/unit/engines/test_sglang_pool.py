"""Several servers as one engine: placement, losses, and that two versions never mix.

The servers are fakes of the wire contract, because a fault must come when the test wants it.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from swerl.core.chat import Finish
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.turn import Sampling
from swerl.engines import _sglang_client, _sglang_pool, sglang
from swerl.engines._sglang_client import connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_wire import PauseMode
from tests.unit.engines._fake_python import fake_python, process_at
from tests.unit.engines._fake_sglang import (
    LAYERS,
    SHAPE,
    TOP_K,
    FakeServer,
    fake_router,
    opened,
)
from tests.unit.engines._launched import ref, setup, until, versions

LONG = Sampling(900)


@pytest.fixture(autouse=True)
def _watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(_sglang_client, "ABORT_WAITS_S", (0.05, 0.1, 0.2, 0.4))


# Placement


async def test_sessions_spread_evenly_and_each_stays_where_it_is(
    servers: list[FakeServer],
) -> None:
    async with opened(servers) as engine:
        for _ in range(4):
            await versions(engine, sessions=9)
    assert [len(server.headers) for server in servers] == [12, 12, 12]


async def test_a_router_gets_one_key_per_session_that_is_not_the_session(
    servers: list[FakeServer],
) -> None:
    async with fake_router(servers) as router, connect([router.url], shape=SHAPE) as engine:
        for _ in range(3):
            await versions(engine, sessions=6)
        assert engine.url == router.url
    keys = [{sent["X-SMG-Routing-Key"] for sent in server.headers} for server in servers]
    assert [len(one) for one in keys] == [2, 2, 2]
    assert not set.union(*keys) & {f"s{n}" for n in range(6)}


async def test_a_server_that_joins_a_router_loads_the_serving_weights(
    servers: list[FakeServer], tmp_path: Path
) -> None:
    late = servers.pop()
    async with fake_router(servers) as router, connect([router.url], shape=SHAPE) as engine:
        await engine.load(ref(tmp_path, "v1"))
        router.servers.append(late)
        await until(lambda: late.version == "v1")


# Aborts


async def test_a_server_that_ignores_aborts_does_not_hold_the_session(
    servers: list[FakeServer],
) -> None:
    async with opened(servers[:1]) as engine:
        servers[0].unresponsive = True
        task = asyncio.create_task(engine.generate([5], LONG, "s"))
        await until(lambda: "/generate" in servers[0].paths)
        abort = asyncio.create_task(engine.abort("s"))
        reply = await asyncio.wait_for(task, 60)
        assert (reply.finish, reply.ids) == (Finish.ABORT, ())
        with pytest.raises(EngineLostError):
            await abort


# Loss


async def test_requests_of_a_killed_server_fail_and_are_not_sent_again(
    servers: list[FakeServer],
) -> None:
    async with opened(servers[:1]) as engine:
        task = asyncio.create_task(engine.generate([5], LONG, "s"))
        await until(lambda: bool(servers[0].running))
        await servers[0].stop()
        with pytest.raises(EngineLostError):
            await task
    assert servers[0].paths.count("/generate") == 1


async def test_a_server_whose_scheduler_is_stuck_is_given_up_if_it_can_be_restarted(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_pool, "STUCK_S", 0.5)

    class StuckHost:
        """A process whose scheduler answers again after a restart."""

        url = servers[0].url
        gpus = ()

        async def start(self) -> None:
            servers[0].stuck = False

        async def stop(self) -> None:
            pass

        async def ended(self) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    servers[0].stuck = True
    settings = ClientSettings(retries=3, wait_s=60)
    async with connect([servers[0].url], settings=settings, hosts=[StuckHost()]) as engine:
        reply = await asyncio.wait_for(engine.generate([5], Sampling(3), "s"), 60)
    assert len(reply.ids) == 3
    assert servers[0].paths.count("/generate") == 2


async def test_a_reply_that_never_comes_is_an_error(servers: list[FakeServer]) -> None:
    async with opened(servers[:1], ClientSettings(reply_s=0.2)) as engine:
        with pytest.raises(EngineLostError, match="no reply within"):
            await engine.generate([5], LONG, "s")
        await until(lambda: not servers[0].running)


async def test_an_abort_tells_if_the_server_of_a_cancelled_request_does_not_answer(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_client, "ABORT_WAITS_S", (0.2,))
    async with opened(servers[:1]) as engine:
        for unresponsive in (False, True):
            sampled = asyncio.create_task(engine.generate([5], LONG, "s"))
            await until(lambda: servers[0].running)
            servers[0].unresponsive = unresponsive
            sampled.cancel()
            await asyncio.wait([sampled])
            with pytest.raises(EngineLostError) if unresponsive else nullcontext():
                await engine.abort("s")
            await until(lambda: not servers[0].running)


async def test_tokens_of_unknown_weights_are_an_engine_error(
    servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 3600.0)
    async with opened(servers[:1]) as engine:
        await engine.load(ref(tmp_path, "v1"))
        await servers[0].restart()
        with pytest.raises(EngineLostError, match="answered with weights 'default'"):
            await engine.generate([5], Sampling(2), "s")


async def test_an_unreachable_server_is_one_error_at_the_start(servers: list[FakeServer]) -> None:
    await servers[1].stop()
    with pytest.raises(EngineLostError, match=f"no SGLang server answers.*{servers[1].url}"):
        async with opened(servers):
            pass


async def test_a_url_of_something_else_is_one_error_at_the_start(
    servers: list[FakeServer],
) -> None:
    with pytest.raises(EngineError, match="neither a server of SGLang nor a router") as caught:
        async with connect([f"{servers[0].url}/v1"]):
            pass
    assert "without a path" in caught.value.hint


@pytest.mark.integration
async def test_a_hung_server_is_replaced_and_its_requests_answered_by_the_right_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are processes, one of which is stopped by SIGSTOP."""
    monkeypatch.setattr(_sglang_pool, "WATCH_EVERY_S", 0.2)
    monkeypatch.setattr(_sglang_pool, "WATCH_S", 1.0)
    notices: list[str] = []
    options = sglang.Options(
        python=fake_python(tmp_path), servers=2, restarts=9, start_timeout_s=120
    )
    async with sglang.open(options, setup(tmp_path, notices)) as engine:
        await engine.load(ref(tmp_path, "v1"))
        sessions = [f"s{n}" for n in range(4)]
        asked = [asyncio.create_task(engine.generate([5], LONG, name)) for name in sessions]
        await until(lambda: bool(engine._flights), limit_s=120)
        hung = process_at(engine.pool.servers[0].url)
        hung.suspend()
        async with asyncio.timeout(120):
            replies = await asyncio.gather(*asked)
        assert {reply.weight_version for reply in replies} == {"v1"}
        assert len({reply.ids for reply in replies}) == 1  # the fake's tokens follow the prompt
        await until(lambda: len(engine.pool.in_use()) == 2, limit_s=120)
        assert not hung.is_running()
        replies = [await engine.generate([7], Sampling(3), name) for name in sessions]
        assert {reply.weight_version for reply in replies} == {"v1"}
    assert "ran but did not answer; restarting it (1 of 9)" in notices[0]


# Weights


async def test_servers_that_hold_different_weights_must_be_loaded_first(
    servers: list[FakeServer], tmp_path: Path
) -> None:
    servers[0].version = "left behind"
    async with opened(servers) as engine:
        with pytest.raises(EngineError, match="different weights"):
            await engine.generate([5], Sampling(1), "s")
        await engine.load(ref(tmp_path, "v1"))
        assert await versions(engine) == {"v1"}


async def test_one_refusal_puts_every_server_back(
    servers: list[FakeServer], tmp_path: Path
) -> None:
    async with opened(servers) as engine:
        await engine.load(ref(tmp_path, "v1"))
        servers[2].refuses_weights = True
        with pytest.raises(EngineError, match="Failed to load"):
            await engine.load(ref(tmp_path, "v2"))
        assert {server.version for server in servers} == {"v1"}
        assert await versions(engine) == {"v1"}


async def test_a_server_that_serves_another_version_than_it_loaded_is_an_error(
    servers: list[FakeServer], tmp_path: Path
) -> None:
    async with opened(servers) as engine:
        await engine.load(ref(tmp_path, "v1"))
        servers[0].lies_about_version = "v7"
        with pytest.raises(EngineError, match="'v7' after loading 'v2'"):
            await engine.load(ref(tmp_path, "v2"))
        assert await versions(engine) == {"v1"}
        assert len(engine.pool.in_use()) == 2


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE])
async def test_running_requests_are_treated_as_the_pause_mode_says(
    servers: list[FakeServer], tmp_path: Path, mode: PauseMode
) -> None:
    async with opened(servers[:1], ClientSettings(pause_mode=mode)) as engine:
        task = asyncio.create_task(engine.generate([5], Sampling(300), "s"))
        await until(lambda: any(one.ids for one in servers[0].running.values()))
        await engine.load(ref(tmp_path, "v1"))
        reply = await task
    finish = Finish.ABORT if mode is PauseMode.ABORT else Finish.LENGTH
    assert (reply.weight_version, reply.finish) == ("default", finish)
    assert [change.version for change in reply.weight_changes] == (
        [] if mode is PauseMode.ABORT else ["v1"]
    )


# What is answered


async def test_routed_experts_are_recorded_from_where_the_last_turn_ended(
    servers: list[FakeServer],
) -> None:
    servers[0].routes_experts = True
    async with opened(servers[:1], ClientSettings(routed_experts=True)) as engine:
        reply = await engine.generate([1, 2, 3, 4], Sampling(5, num_routed=2), "s")
    routed = reply.routed
    assert routed is not None
    assert (routed.start, routed.num_positions) == (2, 4 + 5 - 1 - 2)
    assert (routed.num_layers, routed.top_k, routed.bytes_per_id) == (LAYERS, TOP_K, 1)
    assert list(routed.data[:6]) == [2, 3, 3, 4, 4, 5]


async def test_an_engine_that_records_no_experts_is_an_error(servers: list[FakeServer]) -> None:
    async with opened(servers[:1], ClientSettings(routed_experts=True)) as engine:
        with pytest.raises(EngineError, match="no routed experts") as caught:
            await engine.generate([1], Sampling(2), "s")
    assert "--enable-return-routed-experts" in caught.value.hint
