"""Mirroring against a real registry on loopback, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.errors import ImageError, InputError
from swerl.images._http import Patience
from swerl.images.mirror import Mirrored, MirrorOptions, Report, Way, mirror, rewrite
from swerl.oci.reference import Target, parse_target
from swerl.task import GradingSpec, Task

Push = Callable[..., Awaitable[None]]
Make = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Awaitable[Report]]:
    async def call(images: list[str], to: str, **settings: Any) -> Report:
        settings = {"docker_config": tmp_path / "none.json", **settings}
        options = MirrorOptions(patience=Patience(tries=3, first_wait_s=0.001), **settings)
        return await mirror(images, parse_target(to), tmp_path / "lock.json", options=options)

    return call


def failure(report: Report) -> str:
    """The one error of a report, with its hint."""
    (done,) = report.failed
    assert isinstance(done.error, ImageError)
    return f"{done.error} | {done.error.hint}"


async def test_image_arrives_at_second_registry_byte_for_byte(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make, tmp_path: Path
) -> None:
    image, second = make_image("a", "b"), start_registry()
    await push(image, "swe/task", "v1")
    report = await run([f"{registry.host}/swe/task:v1"], f"{second.host}/mirror")
    pinned = report.images[0].pinned
    assert pinned.reference == f"{second.host}/mirror/swe/task@{image.manifest.digest}"
    assert report.num_blobs(Way.MOVED) == 3
    assert report.moved_bytes == sum(len(data) for data in image.blobs.values())
    again = await mirror([pinned.reference], Target(registry.host, "back"), tmp_path / "other.json")
    assert again.images[0].pinned.digest == image.manifest.digest
    assert second.half_written() == []


async def test_second_run_moves_no_blob_and_asks_the_source_nothing(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    await push(make_image("a"), "swe/task")
    second = start_registry()
    await run([f"{faulty.host}/swe/task"], f"{second.host}/m")
    asked = len(faulty.asked)
    report = await run([f"{faulty.host}/swe/task"], f"{second.host}/m")
    assert report.moved_bytes == 0
    assert report.images[0].blobs == {}
    assert len(faulty.asked) == asked > 0


async def test_same_registry_mounts_instead_of_moving(
    registry: Any, push: Push, make_image: Make, run: Make
) -> None:
    await push(make_image("a", "b"), "swe/task")
    report = await run([f"{registry.host}/swe/task"], f"{registry.host}/copy")
    assert (report.num_blobs(Way.MOUNTED), report.num_blobs(Way.MOVED)) == (3, 0)
    assert registry.half_written() == []


async def test_layer_that_images_share_crosses_once(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    second, names = start_registry(), []
    for number in range(4):
        await push(make_image("shared base", f"own {number}"), f"swe/task{number}")
        names.append(f"{registry.host}/swe/task{number}")
    report = await run(names, f"{second.host}/m")
    assert report.num_blobs(Way.MOVED) == 1 + 4 * 2
    assert report.num_blobs(Way.MOUNTED) == 3


async def test_index_is_reduced_to_linux_amd64(
    registry: Any, start_registry: Make, push: Push, make_image: Make, make_index: Make, run: Make
) -> None:
    amd, arm = make_image("amd"), make_image("arm")
    index = make_index(arm64=arm.manifest, amd64=amd.manifest)
    for image in (amd, arm):
        await push(image, "swe/task", image.manifest.digest)
    await push(type(amd)({}, index), "swe/task", "multi")
    report = await run([f"{registry.host}/swe/task:multi"], f"{start_registry().host}/m")
    assert report.images[0].pinned.digest == amd.manifest.digest
    assert report.num_blobs(Way.MOVED) == 2


async def test_index_without_amd64_names_what_it_has(
    registry: Any, push: Push, make_image: Make, make_index: Make, run: Make
) -> None:
    arm = make_image("arm")
    await push(arm, "swe/task", arm.manifest.digest)
    await push(type(arm)({}, make_index(arm64=arm.manifest)), "swe/task", "multi")
    report = await run([f"{registry.host}/swe/task:multi"], f"{registry.host}/m")
    assert "has no image for linux/amd64 | it has linux/arm64" in failure(report)


async def test_locked_image_keeps_its_digest_when_the_tag_moves(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    old, name = make_image("old"), f"{registry.host}/swe/task"
    await push(old, "swe/task")
    await run([name], f"{registry.host}/first")
    await push(make_image("new"), "swe/task")
    report = await run([name], f"{registry.host}/first")
    assert report.images[0].pinned.digest == old.manifest.digest


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _, body: web.Response(body=b"x" * len(body)), "sent other content than"),
        (lambda _, body: web.Response(body=body[: len(body) // 2]), "sent"),
        (lambda _, body: web.Response(status=404), "has no swe/task@"),
        (lambda _, body: web.Response(status=401), "docker login"),
        (lambda _, body: web.Response(status=503), "answers 503"),
    ],
    ids=["wrong bytes", "half a blob", "404", "401", "503"],
)
async def test_broken_blob_is_one_clear_error_and_leaves_nothing(
    faulty: Any,
    start_registry: Make,
    push: Push,
    make_image: Make,
    run: Make,
    fault: Any,
    words: str,
) -> None:
    image, second = make_image("a", "b"), start_registry()
    await push(image, "swe/task")
    faulty.answers[image.layers[1]] = fault
    report = await run([f"{faulty.host}/swe/task"], f"{second.host}/m")
    assert words in failure(report)
    assert second.half_written() == []
    assert not list(second.folder.rglob("_manifests/tags/*"))
    faulty.answers.clear()
    healed = await run([f"{faulty.host}/swe/task"], f"{second.host}/m")
    assert not healed.failed
    assert healed.num_blobs(Way.MOVED) == 1


async def test_connection_lost_in_a_blob_is_tried_again(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    image = make_image("a" * 5000)
    await push(image, "swe/task")

    async def half(request: web.Request, body: bytes) -> web.StreamResponse:
        faulty.answers.clear()
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    faulty.answers[image.layers[0]] = half
    report = await run([f"{faulty.host}/swe/task"], f"{start_registry().host}/m")
    assert not report.failed
    assert sum(image.layers[0] in line for line in faulty.asked) == 2


async def test_rate_limit_is_waited_out_as_long_as_asked(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    await push(make_image("a"), "swe/task")

    def busy(request: web.Request, body: bytes) -> web.StreamResponse:
        faulty.answers.clear()
        return web.Response(status=429, headers={"Retry-After": "0"})

    faulty.answers["/manifests/latest"] = busy
    report = await run([f"{faulty.host}/swe/task"], f"{start_registry().host}/m")
    assert not report.failed


async def test_rate_limit_of_hours_is_an_error_at_once(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    await push(make_image("a"), "swe/task")
    faulty.answers["/manifests/latest"] = lambda *_: web.Response(
        status=429, headers={"Retry-After": "21600"}
    )
    report = await run([f"{faulty.host}/swe/task"], f"{start_registry().host}/m")
    assert "run the same command later" in failure(report)
    assert len(faulty.asked) == 1


async def test_manifest_of_another_digest_is_refused(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    faulty.answers[image.manifest.digest] = lambda _, body: web.Response(body=body + b" ")
    report = await run(
        [f"{faulty.host}/swe/task@{image.manifest.digest}"], f"{start_registry().host}/m"
    )
    assert "sent other content than" in failure(report)


async def test_missing_image_stops_no_other(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    await push(make_image("a"), "swe/good")
    names = [f"{registry.host}/swe/{name}" for name in ("gone", "good")]
    report = await run(names, f"{start_registry().host}/m")
    assert "has no swe/gone:latest" in failure(report)
    assert [done.image for done in report.images if done.pinned] == [names[1]]


async def test_target_that_is_no_registry_is_one_error(run: Make) -> None:
    with pytest.raises(ImageError, match="does not answer"):
        await run(["127.0.0.1:9/swe/task"], "127.0.0.1:9/m")


async def test_rewrite_reads_images_from_elsewhere(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    await push(make_image("a"), "hub/swe/task", "v1")
    report = await run(
        ["swe/task:v1"],
        f"{start_registry().host}/m",
        rewrites={"docker.io/": f"{registry.host}/hub/"},
    )
    assert not report.failed
    assert report.images[0].image == "swe/task:v1"


async def test_local_images_are_counted_and_left_alone(registry: Any, run: Make) -> None:
    report = await run(["host", "built:a", "dir:/b", "host"], f"{registry.host}/m")
    assert (report.images, report.num_local) == ((), 3)


async def test_two_images_for_one_name_are_refused(run: Make) -> None:
    with pytest.raises(InputError, match="would both become"):
        await run(["a.example/swe/task:1", "b.example/swe/task:1"], "127.0.0.1:9/m")


async def test_tasks_are_rewritten_to_pinned_mirror_names(
    registry: Any, push: Push, make_image: Make, run: Make, tmp_path: Path
) -> None:
    image, name = make_image("a"), f"{registry.host}/swe/task"
    await push(image, "swe/task")
    await run([name], f"{registry.host}/m")
    (task,) = rewrite([_task(name)], tmp_path / "lock.json")
    assert task.image == f"{registry.host}/m/swe/task@{image.manifest.digest}"
    with pytest.raises(ImageError, match="is not in"):
        rewrite([_task("swe/other")], tmp_path / "lock.json")


async def test_login_of_docker_config_opens_a_closed_registry(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make, tmp_path: Path
) -> None:
    await push(make_image("a"), "swe/task")
    closed = start_registry(auth=_htpasswd(tmp_path))
    login = base64.b64encode(b"ann:secret").decode()
    config = tmp_path / "docker.json"
    config.write_text(json.dumps({"auths": {closed.host: {"auth": login}}}))
    names = [f"{registry.host}/swe/task"]
    with pytest.raises(ImageError, match="refuses access"):
        await run(names, f"{closed.host}/m")
    assert not (await run(names, f"{closed.host}/m", docker_config=config)).failed


async def test_bearer_token_is_fetched_for_the_challenged_scope(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make
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
    report = await run([f"{faulty.host}/swe/task"], f"{start_registry().host}/m")
    assert not report.failed


async def test_lock_that_cannot_be_written_is_found_before_any_transfer(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot write lock file"):
        await mirror(["swe/task"], Target("127.0.0.1:9"), tmp_path / "none" / "lock.json")


async def test_file_that_is_no_lock_is_refused_and_kept(run: Make, tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("[]")
    with pytest.raises(InputError, match="no lock file"):
        await run(["swe/task"], "127.0.0.1:9/m")
    assert (tmp_path / "lock.json").read_text() == "[]"


async def test_result_of_every_image_is_told_as_it_ends(
    registry: Any, push: Push, make_image: Make, tmp_path: Path
) -> None:
    await push(make_image("a"), "swe/task")
    told: list[Mirrored] = []
    await mirror(
        [f"{registry.host}/swe/task"],
        Target(registry.host, "m"),
        tmp_path / "lock.json",
        on_done=told.append,
    )
    assert [done.image for done in told] == [f"{registry.host}/swe/task"]


async def test_blobs_of_earlier_runs_are_mounted_too(
    registry: Any, start_registry: Make, push: Push, make_image: Make, run: Make
) -> None:
    second, names = start_registry(), []
    for number in range(3):
        await push(make_image("shared base", f"own {number}"), f"swe/task{number}")
        names.append(f"{registry.host}/swe/task{number}")
    await run(names[:2], f"{second.host}/m")
    report = await run(names[2:], f"{second.host}/m")
    assert (report.num_blobs(Way.MOUNTED), report.num_blobs(Way.MOVED)) == (1, 2)


MIRROR = """
import asyncio, sys
from pathlib import Path
from swerl.images.mirror import mirror
from swerl.oci.reference import parse_target
print("begun", flush=True)
report = asyncio.run(mirror(sys.argv[3:], parse_target(sys.argv[2]), Path(sys.argv[1])))
sys.exit(bool(report.failed))
"""


async def test_mirror_killed_at_any_moment_goes_on(
    faulty: Any, start_registry: Make, push: Push, make_image: Make, run: Make, tmp_path: Path
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
    report = await run(names, f"{second.host}/m")
    assert not report.failed
    asked = len(faulty.asked)
    report = await run(names, f"{second.host}/m")
    assert (report.moved_bytes, len(faulty.asked)) == (0, asked)


async def test_list_is_reduced_to_the_platform_asked_for(
    registry: Any, push: Push, make_image: Make, make_index: Make, run: Make
) -> None:
    amd, arm = make_image("amd"), make_image("arm")
    for image in (amd, arm):
        await push(image, "swe/task", image.manifest.digest)
    index = make_index(arm64=arm.manifest, amd64=amd.manifest)
    await push(type(amd)({}, index), "swe/task", "multi")
    name = f"{registry.host}/swe/task:multi"
    report = await run([name], f"{registry.host}/m", platform=("linux", "arm64"))
    assert report.images[0].pinned.digest == arm.manifest.digest


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *_: web.Response(status=401), "or correct the login"),
        (lambda *_: web.Response(status=503), "says 503"),
        (lambda *_: web.Response(text="<html>"), "answers without a token"),
        (lambda *_: web.json_response([]), "answers without a token"),
        (lambda *_: web.json_response({}), "answers without a token"),
    ],
)
async def test_token_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, run: Make, answer: Any, words: str
) -> None:
    await push(make_image("a"), "swe/task")
    realm = f'Bearer realm="http://{faulty.host}/token",service="s",scope="repository:x:pull"'
    headers = {"WWW-Authenticate": realm}
    faulty.answers["/manifests/latest"] = lambda *_: web.Response(status=401, headers=headers)
    faulty.answers["/token"] = answer
    assert words in failure(await run([f"{faulty.host}/swe/task"], f"{faulty.host}/m"))


def _htpasswd(folder: Path) -> str:
    file = folder / "htpasswd"
    file.write_text("ann:$2b$04$w8TQnQH20FCWqGdBFzMUS.jZCRl2HqUT3L/pBMRjILBOsIvFSxyee\n")
    return f"auth: {{htpasswd: {{realm: test, path: {file}}}}}"


def _task(image: str) -> Task:
    return Task("t", "o/r", image, "/repo", "fix it", GradingSpec(grader="command"))
