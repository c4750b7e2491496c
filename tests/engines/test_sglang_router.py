"""A router that the run starts in front of its servers: a fake of it, and the real sglang-router.

The servers are fakes of SGLang's contract. Needs an interpreter with sglang-router in
SWERL_SGLANG_PYTHON for the real one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import InputError
from swerl.core.turn import Sampling
from swerl.engines import _sglang_fleet, sglang
from swerl.engines._sglang_http import HttpEngine
from tests.engines import _launched
from tests.engines._fake_python import fake_python, process_at
from tests.engines._launched import ref, setup
from tests.engines._served import sglang_python

LONG = Sampling(900)
until = partial(_launched.until, limit_s=600)
SESSIONS = [f"s{n}" for n in range(8)]


@pytest.fixture(autouse=True)
def _watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sglang_fleet, "WATCH_EVERY_S", 0.2)


@pytest.fixture(params=["fake", "sglang"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> sglang.Options:
    real = sglang_python() if request.param == "sglang" else None
    python = fake_python(tmp_path, router=real)
    return sglang.Options(python=python, servers=2, router=True, restarts=9, start_timeout_s=600)


async def listed(engine: HttpEngine) -> set[str]:
    """Return the servers that the router knows."""
    router = engine._fleet.crew.router
    assert router is not None
    return set(await router.workers() or ())


async def until_whole(engine: HttpEngine) -> None:
    """Wait until router and servers are in use, and the router knows the servers."""
    crew = engine._fleet.crew
    assert crew.router is not None
    await until(lambda: len(crew.alive()) == 2 and not crew.router.lost)
    async with asyncio.timeout(600):
        while len(await listed(engine)) != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def through_router(engine: HttpEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note where requests are sent."""
    sent: list[str] = []
    place = engine._fleet.place

    def noted(session: str, **how: Any) -> Any:
        server = place(session, **how)
        sent.append(server.url)
        return server

    monkeypatch.setattr(engine._fleet, "place", noted)
    return sent


async def test_a_runs_router_keeps_sessions_and_survives_what_dies_behind_it(
    options: sglang.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    async with sglang.open(options, setup(tmp_path, told)) as engine:
        sent = through_router(engine, monkeypatch)
        await engine.load(ref(tmp_path, "v1"))
        # A session's later turns find their prefix where the first one left it.
        prompt = list(range(3, 60))
        for turn in range(3):
            calls = (
                engine.generate([n + 3, *prompt][: 20 + 10 * turn], Sampling(2), name)
                for n, name in enumerate(SESSIONS)
            )
            replies = await asyncio.gather(*calls)
            assert {reply.weight_version for reply in replies} == {"v1"}
            assert all(reply.logprobs == (-1.5, -1.5) for reply in replies)
            if turn:
                assert all(reply.cached_tokens >= 10 * turn for reply in replies)
        assert set(sent) == {engine.url}

        task = asyncio.create_task(engine.generate([5], LONG, "aborted"))
        await until(lambda: bool(engine._flights))
        await engine.abort("aborted")
        assert (await task).finish.value == "abort"

        asked = [asyncio.create_task(engine.generate([5], LONG, name)) for name in SESSIONS]
        await until(lambda: len(engine._flights) == len(SESSIONS))
        process_at(engine._fleet.crew.servers[0].url).kill()
        replies = await asyncio.gather(*asked)
        assert {reply.weight_version for reply in replies} == {"v1"}
        assert len({reply.ids for reply in replies}) == 1
        await until_whole(engine)

        asked = [asyncio.create_task(engine.generate([5], LONG, name)) for name in SESSIONS]
        await until(lambda: len(engine._flights) == len(SESSIONS))
        process_at(engine.url).kill()
        assert {reply.ids for reply in await asyncio.gather(*asked)} == {replies[0].ids}
        await until_whole(engine)
        sent.clear()
        await engine.generate([5], Sampling(2), "s0")
        assert sent == [engine.url]
    gone = [each for each in told if "is started again (1 of 9)" in each]
    assert len(gone) == 2


async def test_a_router_of_its_own_in_front_of_given_servers_is_refused(tmp_path: Path) -> None:
    options = sglang.Options(url="http://127.0.0.1:9", router=True)
    with pytest.raises(InputError, match="servers that the run launches"):
        async with sglang.open(options, setup(tmp_path, [])):
            pass
