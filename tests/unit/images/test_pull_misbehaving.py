"""Pulls from registries that misbehave, of lying images, onto full disks, by killed processes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.images.manifest import IMAGE_TYPES, Manifest, sha256
from swerl.images.pull import PullOptions, pull
from swerl.images.store import Store
from tests.unit.images.layers import Bring, Entry, Make, Push, failure, leftovers, make_tar


def status(code: int, **headers: str) -> Any:
    return lambda *_: web.Response(status=code, headers=headers)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _, body: web.Response(body=b"x" * len(body)), "sent content that does not match"),
        (lambda _, body: web.Response(body=body[: len(body) // 2]), "bytes of swe/task@"),
        (lambda _, body: web.Response(body=body * 2), "sent more than"),
        (status(404), "has no swe/task@"),
        (status(401), "docker login"),
        (status(403), "docker login"),
        (status(429), "limits the rate of requests"),
        (status(500), "answered 500"),
    ],
    ids=["bytes", "half", "more", "404", "401", "403", "429", "500"],
)
async def test_blob_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, bring: Bring, store: Store, fault: Any, words: str
) -> None:
    image = make_image("a", "b")
    await push(image, "swe/task")
    faulty.answers[image.layers[1]] = fault
    assert words in failure(await bring(f"{faulty.host}/swe/task", workers=1))
    assert not (store.root / "names").exists()
    assert [*(store.root / "work").iterdir()] == []
    faulty.answers.clear()
    (healed,) = await bring(f"{faulty.host}/swe/task")
    assert healed.stored is not None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda *_: web.Response(body=b"{", content_type=IMAGE_TYPES[0]), "is not JSON"),
        (lambda *_: web.Response(text="<html>", content_type="text/html"), "text/html"),
        (lambda *_: web.Response(body=bytes(5 << 20)), "larger than 4 MiB"),
    ],
    ids=["no JSON", "page", "huge"],
)
async def test_manifest_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, bring: Bring, store: Store, fault: Any, words: str
) -> None:
    await push(make_image("a"), "swe/task")
    faulty.answers["/manifests/latest"] = fault
    assert words in failure(await bring(f"{faulty.host}/swe/task"))
    assert leftovers(store) == []


async def test_manifest_of_another_digest_is_refused(
    faulty: Any, push: Push, make_image: Make, bring: Bring
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    faulty.answers[image.manifest.digest] = lambda _, body: web.Response(body=body + b" ")
    done = await bring(f"{faulty.host}/swe/task@{image.manifest.digest}")
    assert "sent content that does not match" in failure(done)


@pytest.mark.parametrize("until", ["0", "soon"])
async def test_rate_limit_is_waited_out_as_long_as_asked(
    faulty: Any, push: Push, make_image: Make, bring: Bring, until: str
) -> None:
    await push(make_image("a"), "swe/task")

    def busy(*_: Any) -> web.StreamResponse:
        faulty.answers.clear()
        return web.Response(status=429, headers={"Retry-After": until})

    faulty.answers["/manifests/latest"] = busy
    (done,) = await bring(f"{faulty.host}/swe/task")
    assert done.stored is not None


async def test_broken_connection_is_tried_again(
    faulty: Any, push: Push, bring: Bring, make_image: Make
) -> None:
    image = make_image(os.urandom(300_000).hex())
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
    (done,) = await bring(f"{faulty.host}/swe/task")
    assert done.stored is not None
    assert sum(image.layers[0] in line for line in faulty.asked) == 2


async def test_layer_that_cannot_be_unpacked_leaves_nothing(
    registry: Any, push: Push, bring: Bring, store: Store, make_image: Make
) -> None:
    tar = make_tar(Entry("../out"))
    blob = gzip.compress(tar)
    await push(forged(make_image("x"), blob, sha256(tar)), "swe/task")
    assert "leads out" in failure(await bring(f"{registry.host}/swe/task"))
    assert leftovers(store) == []
    assert not store.blob(sha256(blob)).exists()


def forged(image: Any, blob: bytes, *diff_ids: str) -> Any:
    """An image of one layer whose config says what it likes."""
    rootfs = {"type": "layers", "diff_ids": list(diff_ids)}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    entries = [
        {"mediaType": kind, "digest": sha256(data), "size": len(data)}
        for kind, data in (
            ("application/vnd.oci.image.config.v1+json", config),
            ("application/vnd.oci.image.layer.v1.tar+gzip", blob),
        )
    ]
    body = {"schemaVersion": 2, "mediaType": IMAGE_TYPES[0], "config": entries[0]}
    manifest = json.dumps({**body, "layers": entries[1:]}).encode()
    blobs = {sha256(data): data for data in (config, blob)}
    return type(image)(blobs, Manifest("forged", manifest, IMAGE_TYPES[0]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here: it takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("packed", [False, True], ids=["blob", "layer"])
async def test_full_disk_is_one_clear_error(
    registry: Any, push: Push, make_image: Make, small_disk: Path, packed: bool, tmp_path: Path
) -> None:
    text = "x" * 6_000_000 if packed else os.urandom(2_000_000).hex()
    await push(make_image(text), "swe/task")
    store = Store(small_disk / "store")
    options = PullOptions(docker_config=tmp_path / "none.json")
    done = await pull([f"{registry.host}/swe/task"], store, options=options)
    assert "no space is left" in failure(done)
    assert "images gc" in failure(done)
    assert leftovers(store) == []


PULL = """
import asyncio, sys
from pathlib import Path
from swerl.images.pull import pull
from swerl.images.store import Store
print("begun", flush=True)
done = asyncio.run(pull(sys.argv[2:], Store(Path(sys.argv[1]))))
sys.exit(any(each.error for each in done))
"""


def child(store: Store, *images: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PULL, str(store.root), *images]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


async def test_a_pull_killed_at_any_moment_continues(
    registry: Any, push: Push, make_image: Make, store: Store
) -> None:
    image = make_image(*(os.urandom(400_000).hex() for _ in range(6)))
    await push(image, "swe/task")
    name = f"{registry.host}/swe/task"
    for delay in range(6):
        process = child(store, name)
        assert process.stdout is not None
        process.stdout.readline()
        await asyncio.sleep(0.02 * delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert child(store, name).wait(30) == 0
    assert len(store.find(name).layers) == 6
    store.remove_leftovers()
    assert [*(store.root / "work").iterdir()] == []
