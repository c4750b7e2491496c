"""Mirroring where registries misbehave, ask for logins, or the mirror is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.core.errors import InputError
from tests.unit.images.pulls import Make, Push, failure

MIRROR = """
import asyncio, sys
from pathlib import Path
from swerl.images.mirror import mirror
from swerl.core.image_reference import parse_target
print("begun", flush=True)
report = asyncio.run(mirror(sys.argv[3:], parse_target(sys.argv[2]), Path(sys.argv[1])))
sys.exit(any(image.error for image in report))
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _, body: web.Response(body=b"x" * len(body)), "sent content that does not match"),
        (lambda _, body: web.Response(status=401), "docker login"),
    ],
    ids=["wrong bytes", "401"],
)
async def test_broken_blob_is_one_clear_error_and_leaves_nothing(
    faulty: Any,
    start_registry: Make,
    push: Push,
    make_image: Make,
    copy: Make,
    fault: Any,
    words: str,
) -> None:
    image, second = make_image("a", "b"), start_registry()
    await push(image, "swe/task")
    faulty.answers[image.layers[1]] = fault
    report = await copy([f"{faulty.host}/swe/task"], f"{second.host}/m")
    assert words in failure(report.images)
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
