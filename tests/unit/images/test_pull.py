"""Plan pulls, and pull from a real registry into the store."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from swerl.core.errors import InputError
from swerl.core.image_reference import base_url
from swerl.images.manifest import INDEX_TYPES, Manifest
from swerl.images.mirror import rewritten
from swerl.images.pull import PullOptions, plan
from swerl.images.store import Store
from tests.unit.images.layers import Bring, Make, Push, failure


async def test_image_is_ready_for_a_sandbox(
    registry: Any, push: Push, make_image: Make, bring: Bring, store: Store
) -> None:
    image = make_image("a", "b")
    await push(image, "swe/task", "v1")
    (done,) = await bring(f"{registry.host}/swe/task:v1")
    assert done.stored is not None
    assert done.stored.digest == image.manifest.digest
    assert [(path / "etc/motd").read_text() for path in done.stored.layers] == ["a", "b"]
    assert done.moved_bytes == sum(len(data) for data in image.blobs.values())
    assert store.find(f"{registry.host}/swe/task:v1") == done.stored
    assert list((store.root / "work").iterdir()) == []


async def test_second_pull_asks_nothing(
    faulty: Any, push: Push, make_image: Make, bring: Bring
) -> None:
    await push(make_image("a"), "swe/task")
    await bring(f"{faulty.host}/swe/task")
    asked = len(faulty.asked)
    (done,) = await bring(f"{faulty.host}/swe/task")
    assert (done.moved_bytes, len(faulty.asked)) == (0, asked)


async def test_refresh_follows_a_tag_that_moved(
    registry: Any, push: Push, make_image: Make, bring: Bring
) -> None:
    await push(make_image("old"), "swe/task")
    await bring(f"{registry.host}/swe/task")
    new = make_image("new")
    await push(new, "swe/task")
    (kept,) = await bring(f"{registry.host}/swe/task")
    (fresh,) = await bring(f"{registry.host}/swe/task", refresh=True)
    assert kept.stored is not None
    assert fresh.stored is not None
    assert kept.stored.digest != fresh.stored.digest == new.manifest.digest


async def test_layer_that_images_share_comes_once(
    faulty: Any, push: Push, make_image: Make, bring: Bring, store: Store
) -> None:
    for number in range(4):
        await push(make_image("base", f"own {number}"), f"swe/task{number}")
    await bring(*(f"{faulty.host}/swe/task{number}" for number in range(4)))
    base = make_image("base", "own 0").layers[0]
    assert sum(base in line for line in faulty.asked) == 1
    assert len(list((store.root / "layers").iterdir())) == 5


async def test_index_is_reduced_to_this_machine(
    registry: Any,
    push: Push,
    make_image: Make,
    make_index: Make,
    bring: Bring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amd, arm = make_image("amd"), make_image("arm", architecture="arm64")
    index = make_index(arm64=arm.manifest, amd64=amd.manifest)
    for image in (amd, arm):
        await push(image, "swe/task", image.manifest.digest)
    await push(type(amd)({}, index), "swe/task", "multi")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (done,) = await bring(f"{registry.host}/swe/task:multi@{index.digest}")
    assert done.stored is not None
    assert done.stored.digest == arm.manifest.digest


@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_rewrite_reads_from_a_mirror_and_keeps_the_name(
    registry: Any, push: Push, make_image: Make, bring: Bring, store: Store, scheme: str
) -> None:
    image = make_image("a")
    await push(image, "hub/swe/task", "v1")
    await bring("swe/task:v1", rewrites={"docker.io/": f"{scheme}{registry.host}/hub/"})
    assert store.find("docker.io/swe/task:v1").digest == image.manifest.digest
    (named,) = store.names()
    assert named.source == f"{scheme}{registry.host}/hub/swe/task@{image.manifest.digest}"


def test_only_a_rewrite_names_a_mirror_without_encryption() -> None:
    mirror = rewritten("swe/task", {"docker.io/": "http://10.1.2.3:5000/hub/"})
    assert base_url(mirror.registry) == "http://10.1.2.3:5000"
    with pytest.raises(InputError):
        rewritten("http://10.1.2.3:5000/hub/swe/task", {})


async def test_an_image_for_another_machine_is_refused(
    registry: Any, push: Push, make_image: Make, bring: Bring, store: Store
) -> None:
    await push(make_image("a", architecture="s390x"), "swe/task")
    assert "is for linux/s390x, not for linux/" in failure(await bring(f"{registry.host}/swe/task"))
    assert store.names() == []


@pytest.mark.parametrize("architecture", ["amd64", "s390x"])
async def test_an_entry_of_an_index_without_a_platform_is_taken_if_its_config_fits(
    registry: Any, push: Push, make_image: Make, bring: Bring, architecture: str
) -> None:
    image = make_image("a", architecture=architecture)
    entry = {"digest": image.manifest.digest, "size": len(image.manifest.body)}
    other = {**entry, "platform": {"os": "unknown", "architecture": "unknown"}}
    body = json.dumps(
        {"schemaVersion": 2, "mediaType": INDEX_TYPES[0], "manifests": [other, entry]}
    )
    await push(image, "swe/task", image.manifest.digest)
    index = Manifest("made", body.encode(), INDEX_TYPES[0])
    await push(type(image)({}, index), "swe/task", "multi")
    (done,) = await bring(f"{registry.host}/swe/task:multi")
    assert (done.error is None) == (architecture == "amd64")


async def test_login_of_docker_config_opens_a_closed_registry(
    make_image: Make, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login of password others\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with guarded(make_image("a"), "ann:secret") as host:
        for login in ("", "ann:wrong"):
            config = docker_config(tmp_path, host, login)
            assert "docker login" in failure(await bring(f"{host}/swe/task", docker_config=config))
        config = docker_config(tmp_path, host, "ann:secret")
        (done,) = await bring(f"{host}/swe/task", docker_config=config)
        assert done.stored is not None


def docker_config(folder: Path, host: str, login: str) -> Path:
    config = folder / "docker.json"
    auth = base64.b64encode(login.encode()).decode()
    config.write_text(json.dumps({"auths": {host: {"auth": auth}} if login else {}}))
    return config


@asynccontextmanager
async def guarded(image: Any, login: str) -> AsyncIterator[str]:
    """A registry of one image that wants a login."""
    wanted = "Basic " + base64.b64encode(login.encode()).decode()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != wanted:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        if "/manifests/" in request.path:
            return web.Response(body=image.manifest.body, content_type="application/json")
        return web.Response(body=image.blobs[request.path.rpartition("/")[2]])

    async with RawTestServer(handle) as server:
        yield f"127.0.0.1:{server.port}"


async def test_a_shared_layer_counts_once_and_no_manifest_is_fetched_again(
    faulty: Any, push: Push, make_image: Make, store: Store, tmp_path: Path
) -> None:
    pair = make_image("base", "a"), make_image("base", "b")
    for image, name in zip(pair, ("one", "two"), strict=True):
        await push(image, f"swe/{name}")
    names = [f"{faulty.host}/swe/{name}" for name in ("one", "two", "one")] + ["host", "built:x"]
    options = PullOptions(docker_config=tmp_path / "none.json")

    first = await plan(names, store, options=options)
    faulty.asked.clear()
    again = await plan(names, store, options=options)

    sizes = {digest: len(data) for image in pair for digest, data in image.blobs.items()}
    assert (first.num_images, first.num_local, first.num_stored) == (2, 2, 0)
    assert {blob.digest: blob.size for blob in first.missing} == sizes
    assert first.blobs == first.missing
    assert first.pulls == {faulty.host: 2}
    assert again == first
    assert {line.split()[0] for line in faulty.asked} == {"HEAD"}
