"""The `e2b` backend beyond conformance: settings, metadata, mounts, routes to the gateway."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Mount
from swerl.sandboxes import e2b

from ..e2b_server.helpers import Service
from ..helpers import LIMITS, WORKDIR, sh
from .provider import backend

pytest.importorskip("e2b", reason="the package `e2b` is not installed")


# Settings


def test_a_missing_key_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(e2b.KEY)
    with pytest.raises(SandboxUnavailableError, match="E2B_API_KEY is not set") as caught:
        e2b.build(e2b.Options())
    assert "export E2B_API_KEY" in caught.value.hint


# Metadata


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


# Mounts


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
