"""Mirror from one real registry to another: whole, misbehaving, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from swerl.core.errors import ImageError, InputError
from swerl.core.image_reference import Target
from swerl.images.mirror import mirror
from swerl.images.registry import Registry
from tests.unit.images.layers import Make, Push, failure


async def test_image_arrives_at_second_registry_byte_for_byte(
    registry: Any, start_registry: Make, push: Push, make_image: Make, copy: Make, tmp_path: Path
) -> None:
    image, second = make_image("a", "b"), start_registry()
    await push(image, "swe/task", "v1")
    report = await copy([f"{registry.host}/swe/task:v1"], f"{second.host}/mirror")
    pinned = report.images[0].pinned
    assert pinned.reference == f"{second.host}/mirror/swe/task@{image.manifest.digest}"
    assert report.moved_bytes == sum(len(data) for data in image.blobs.values())
    again = await mirror([pinned.reference], Target(registry.host, "back"), tmp_path / "other.json")
    assert again[0].pinned.digest == image.manifest.digest
    assert second.half_written() == []


@pytest.mark.parametrize("refuses", [False, True])
async def test_same_registry_mounts_unless_it_refuses(
    refuses: bool, registry: Any, push: Push, make_image: Make, copy: Make, monkeypatch: Any
) -> None:
    image = make_image("a", "b")
    await push(image, "swe/task")
    if refuses:
        monkeypatch.setattr(Registry, "mount", AsyncMock(side_effect=ImageError("403", hint="")))
    report = await copy([f"{registry.host}/swe/task"], f"{registry.host}/copy")
    moved_bytes = sum(map(len, image.blobs.values())) if refuses else 0
    assert (report.failed, report.moved_bytes) == ([], moved_bytes)
    assert registry.half_written() == []


async def test_layer_that_images_share_crosses_once(
    registry: Any, start_registry: Make, push: Push, make_image: Make, copy: Make
) -> None:
    second, names, blobs = start_registry(), [], {}
    for number in range(4):
        image = make_image("shared base", f"own {number}")
        blobs |= image.blobs
        await push(image, f"swe/task{number}")
        names.append(f"{registry.host}/swe/task{number}")
    report = await copy(names, f"{second.host}/m")
    assert len(blobs) == 1 + 4 * 2
    assert report.moved_bytes == sum(map(len, blobs.values()))


async def test_locked_image_keeps_its_digest_when_the_tag_moves(
    registry: Any, start_registry: Make, push: Push, make_image: Make, copy: Make
) -> None:
    old, name = make_image("old"), f"{registry.host}/swe/task"
    await push(old, "swe/task")
    await copy([name], f"{registry.host}/first")
    await push(make_image("new"), "swe/task")
    report = await copy([name], f"{registry.host}/first")
    assert report.images[0].pinned.digest == old.manifest.digest


async def test_two_images_for_one_name_are_refused(copy: Make) -> None:
    with pytest.raises(InputError, match="would both become"):
        await copy(["a.example/swe/task:1", "b.example/swe/task:1"], "127.0.0.1:9/m")


MIRROR = """
import asyncio, sys
from pathlib import Path
from swerl.images.mirror import mirror
from swerl.core.image_reference import parse_target
print("begun", flush=True)
report = asyncio.run(mirror(sys.argv[3:], parse_target(sys.argv[2]), Path(sys.argv[1])))
sys.exit(any(image.error for image in report))
"""


async def test_broken_blob_is_one_clear_error_and_leaves_nothing(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, copy: Make
) -> None:
    image, second = make_image("a", "b"), start_registry()
    await push(image, "swe/task")
    faulty.answers[image.layers[1]] = lambda _, body: web.Response(body=b"x" * len(body))
    report = await copy([f"{faulty.host}/swe/task"], f"{second.host}/m")
    assert "sent content that does not match" in failure(report.images)
    assert second.half_written() == []
    assert not list(second.folder.rglob("_manifests/tags/*"))
    faulty.answers.clear()
    healed = await copy([f"{faulty.host}/swe/task"], f"{second.host}/m")
    assert not healed.failed
    assert healed.moved_bytes == len(image.blobs[image.layers[1]])


async def test_bearer_token_is_fetched_for_the_challenged_scope(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, copy: Make
) -> None:
    await push(make_image("a"), "swe/task")

    def guard(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.headers.get("Authorization") == "Bearer t0ken":
            return web.Response(body=body, content_type=make_image("a").manifest.media_type)
        realm = f'Bearer realm="http://{faulty.host}/token",service="s",scope="repository:x:pull"'
        return web.Response(status=401, headers={"WWW-Authenticate": realm})

    def token(request: web.Request, body: bytes) -> web.StreamResponse:
        assert request.query["scope"] == "repository:x:pull"
        return web.json_response({"token": "t0ken"})

    faulty.answers.update({"/manifests/latest": guard, "/token": token})
    report = await copy([f"{faulty.host}/swe/task"], f"{start_registry().host}/m")
    assert not report.failed


async def test_file_that_is_no_lock_is_refused_and_kept(copy: Make, tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("[]")
    with pytest.raises(InputError, match="not a lock file"):
        await copy(["swe/task"], "127.0.0.1:9/m")
    assert (tmp_path / "lock.json").read_text() == "[]"


async def test_a_mirror_killed_at_any_moment_continues(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, copy: Make, tmp_path: Path
) -> None:
    second, names = start_registry(), []
    for number in range(4):
        await push(make_image(os.urandom(300_000).hex(), f"own {number}"), f"swe/task{number}")
        names.append(f"{faulty.host}/swe/task{number}")
    argv = [sys.executable, "-c", MIRROR, str(tmp_path / "lock.json"), f"{second.host}/m", *names]
    for delay in range(6):
        process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        await asyncio.sleep(0.03 * delay)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    report = await copy(names, f"{second.host}/m")
    assert not report.failed
    asked = len(faulty.asked)
    report = await copy(names, f"{second.host}/m")
    assert (report.moved_bytes, len(faulty.asked)) == (0, asked)
    assert all(image.was_there for image in report.images)
