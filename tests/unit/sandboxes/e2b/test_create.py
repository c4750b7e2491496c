"""`e2b` sandboxes beyond conformance: creation, settings, metadata, mounts."""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path

import pytest
from aiohttp import web

from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Mount
from swerl.sandboxes import e2b

from ..e2b_faults import Faults, failing, is_create, once
from ..e2b_server.helpers import Service
from ..helpers import LIMITS, WORKDIR, refuse, sh
from .conftest import backend

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
    faults.answer = once(failing(429, "20 concurrent sandboxes"), times=10_000)
    error = await refuse(backend(faults.url), "base", SandboxError)
    assert "no sandbox of 'base' within 1.5 s" in str(error)
    assert "20 concurrent sandboxes" in str(error)
    assert "rollout.concurrency" in error.hint
    assert (error.retryable, faults.creates > 1) == (True, True)


async def test_a_plan_that_limits_the_lifetime_is_named(faults: Faults) -> None:
    faults.answer = once(failing(400, "Timeout cannot be greater than 1 hours"))
    error = await refuse(backend(faults.url), "base", SandboxUnavailableError)
    assert "budgets.sandbox_s" in error.hint


def test_a_missing_key_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(e2b.KEY)
    with pytest.raises(SandboxUnavailableError, match="E2B_API_KEY is not set") as caught:
        e2b.build(e2b.Options())
    assert "export E2B_API_KEY" in caught.value.hint


async def test_the_image_is_sent_as_metadata_if_image_key_is_set(service: Service) -> None:
    made = backend(service.url, image_key="image", metadata={"pool/size": "md"})
    async with made.open("host", LIMITS, workdir=WORKDIR, name="swerl-1-routed") as opened:
        assert await sh(opened, "echo up") == "up\n"
        (found,) = await made._provider.find({"swerl": "swerl-1-routed"})
        assert found.metadata["image"] == "host"
        assert found.metadata["pool/size"] == "md"
        (live,) = [each for each in await made.live() if each.name == "swerl-1-routed"]
        assert (live.id, live.image) == (opened.id, "host")
        assert live.started_unix_s > 1e9


async def test_a_mount_is_packed_once_and_read_only(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tool"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "bin" / "run").chmod(0o755)
    (folder / "link").symlink_to("bin/run")
    packs = []
    for _ in range(2):
        async with backend(service.url).open(
            "base", LIMITS, workdir=WORKDIR, mounts=[Mount(folder, "/opt/a tool")]
        ) as opened:
            assert await sh(opened, "'/opt/a tool/link'") == "ran\n"
            assert (await opened.run(["touch", "/opt/a tool/new"])).exit_code == 1
            with pytest.raises(SandboxError, match="read-only"):
                await opened.write("/opt/a tool/bin/run", b"x")
        packs.append([(pack, pack.stat().st_mtime_ns) for pack in tmp_path.glob("cache/e2b/*.gz")])
    assert packs[0] == packs[1]
    assert len(packs[0]) == 1
    assert tarfile.is_tarfile(packs[0][0][0])
