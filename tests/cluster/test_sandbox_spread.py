"""Where a sandbox goes, and what becomes of it when its server ends. A fake backend opens it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from swerl.cluster.sandbox_servers import Site, Spread
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Limits


class Opened:
    """A sandbox that only knows why it is lost."""

    lost: SandboxLostError | None = None

    def lose(self, error: SandboxLostError) -> None:
        self.lost = error


class Opens:
    """Stands in for an E2BBackend, which needs a server; opens while `may_open` is set."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.closes = True

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **_: object) -> AsyncIterator[Opened]:
        await self.may_open.wait()
        sandbox = Opened()
        yield sandbox
        if not self.closes:
            raise SandboxError("the server does not answer")


def _two() -> tuple[Spread, list[Site], list[Opens]]:
    spread = Spread(["n1", "n2"])
    backends = [Opens(), Opens()]
    for site, backend in zip(spread.sites, backends, strict=True):
        site.serve(backend)  # type: ignore[arg-type]
    return spread, spread.sites, backends


def _open(spread: Spread) -> Any:
    return spread.open("host", Limits(), workdir="/w")


async def test_each_sandbox_goes_where_the_fewest_are() -> None:
    spread, sites, _ = _two()
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(_open(spread))
        assert [site.num_open for site in sites] == [2, 2]
        async with _open(spread), _open(spread):
            assert [site.num_open for site in sites] == [3, 3]
    assert [site.num_open for site in sites] == [0, 0]


async def test_one_that_is_being_opened_counts_where_it_will_be() -> None:
    spread, sites, backends = _two()
    backends[0].may_open.clear()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_open(spread).__aenter__())
        await asyncio.sleep(0)
        async with _open(spread):
            assert [site.num_open for site in sites] == [1, 1]
        waiting.cancel()
    assert [site.num_open for site in sites] == [0, 0]


async def test_a_server_that_ends_loses_its_sandboxes_and_no_others() -> None:
    spread, sites, backends = _two()
    backends[0].closes = False
    async with _open(spread) as first, _open(spread) as second:
        sites[0].lose("exit code 137")
        assert "server on n1 ended: exit code 137" in str(first.lost)
        assert second.lost is None
        async with _open(spread):
            assert [site.num_open for site in sites] == [1, 2]
    assert [site.num_open for site in sites] == [0, 0]


async def test_a_sandbox_that_does_not_close_is_an_error_while_its_server_serves() -> None:
    spread, _, backends = _two()
    backends[0].closes = False
    with pytest.raises(SandboxError, match="does not answer"):
        async with _open(spread):
            pass


async def test_an_opening_ends_with_the_server_that_it_waits_for() -> None:
    spread, sites, backends = _two()
    backends[0].may_open.clear()
    opening = asyncio.create_task(_open(spread).__aenter__())
    await asyncio.sleep(0)
    sites[0].lose("killed")
    with pytest.raises(SandboxLostError, match="server on n1 ended: killed"):
        await opening
    assert sites[0].num_open == 0


async def test_without_a_server_it_waits_for_one_and_fails_where_none_will_come() -> None:
    spread, sites, backends = _two()
    sites[0].lose("killed", for_good=True)
    sites[1].lose("killed")
    opening = asyncio.create_task(_open(spread).__aenter__())
    await asyncio.sleep(0)
    assert not opening.done()
    sites[1].serve(backends[1])  # type: ignore[arg-type]
    assert isinstance(await opening, Opened)
    sites[1].lose("killed", for_good=True)
    with pytest.raises(SandboxUnavailableError, match="no machine of the cluster serves"):
        await _open(spread).__aenter__()
