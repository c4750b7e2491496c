"""Creation of `e2b` sandboxes: retried if that helps, and never leaked."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from swerl.core.errors import SandboxError
from swerl.sandboxes import e2b

from ..e2b_faults import Faults, failing, is_create, once
from ..helpers import LIMITS, WORKDIR, sh
from .provider import backend

pytest.importorskip("e2b", reason="the package `e2b` is not installed")


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_create_that_fails_temporarily_is_retried(faults: Faults, status: int) -> None:
    faults.answer = once(failing(status), times=2)
    made = backend(faults.url)
    async with made.open("base", LIMITS, workdir=WORKDIR) as opened:
        assert await sh(opened, "echo up") == "up\n"
    assert faults.creates == 3
    assert not await made.live()


async def test_a_create_whose_answer_is_lost_leaves_one_sandbox_and_then_none(
    faults: Faults,
) -> None:
    faults.answer = once(lambda _: "lose")
    made = backend(faults.url)
    async with made.open("base", LIMITS, workdir=WORKDIR) as opened:
        assert [live.id for live in await made.live()] == [opened.id]
    assert faults.creates == 2
    assert not await made.live()


async def test_a_create_that_is_cancelled_leaves_nothing(faults: Faults) -> None:
    made, asked = backend(faults.url), asyncio.Event()

    def lose(request: web.BaseRequest) -> None:
        if is_create(request):
            asked.set()

    faults.answer = lose
    opening = asyncio.ensure_future(
        made.open("base", LIMITS, workdir=WORKDIR).__aenter__()  # type: ignore[arg-type]
    )
    await asked.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not await made.live()


async def test_all_attempts_share_one_time_limit(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2b, "_BOOT_S", 1.5)
    faults.answer = once(failing(503, "no capacity"), times=10_000)
    with pytest.raises(SandboxError, match=r"no sandbox of 'base' within 1\.5 s.*") as caught:
        async with backend(faults.url).open("base", LIMITS, workdir=WORKDIR):
            pass
    assert caught.value.retryable
    assert faults.creates > 1
