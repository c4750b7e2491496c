"""Pulling into the store, from a real registry and from one that misbehaves."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.errors import ImageError, InputError
from swerl.images._http import Patience
from swerl.images.pull import Pulled, PullOptions, pull
from swerl.oci.manifest import IMAGE_TYPES, Manifest, sha256
from swerl.oci.store import Store
from tests.oci.layers import Entry, hardlink, make_tar

Push = Callable[..., Awaitable[None]]
Make = Callable[..., Any]
Run = Callable[..., Awaitable[list[Pulled]]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def run(store: Store, tmp_path: Path) -> Run:
    async def call(*images: str, **settings: Any) -> list[Pulled]:
        settings = {"docker_config": tmp_path / "none.json", **settings}
        options = PullOptions(patience=Patience(tries=3, first_wait_s=0.001), **settings)
        return await pull(images, store, options=options)

    return call


def failure(done: list[Pulled]) -> str:
    """The one error of a pull, with its hint."""
    (error,) = [each.error for each in done if each.error]
    assert isinstance(error, ImageError)
    assert error.hint
    return f"{error} | {error.hint}"


def leftovers(store: Store) -> list[Path]:
    """What a failed pull should not leave: names, half blobs, half layers, unpacked layers."""
    folders = ("names", "work", "partial", "layers")
    return [path for name in folders for path in (store.root / name).glob("*")]


async def test_image_is_ready_for_a_sandbox(
    registry: Any, push: Push, make_image: Make, run: Run, store: Store
) -> None:
    image = make_image("a", "b")
    await push(image, "swe/task", "v1")
    (done,) = await run(f"{registry.host}/swe/task:v1")
    assert done.stored is not None
    assert done.stored.digest == image.manifest.digest
    assert [(path / "etc/motd").read_text() for path in done.stored.layers] == ["a", "b"]
    assert done.moved_bytes == sum(len(data) for data in image.blobs.values())
    assert store.find(f"{registry.host}/swe/task:v1") == done.stored
    assert list((store.root / "partial").iterdir()) == []


async def test_hard_links_to_lower_layers_are_copies_of_their_image(
    registry: Any, push: Push, make_image: Make, run: Run
) -> None:
    links = make_tar(hardlink("b", "a")), make_tar(hardlink("c", "b"))
    names = []
    for text in (b"1", b"2"):
        await push(make_image(make_tar(Entry("a", text)), *links), "swe/task", f"v{text.decode()}")
        names.append(f"{registry.host}/swe/task:v{text.decode()}")
    for done, text in zip(await run(*names), (b"1", b"2"), strict=True):
        assert done.stored is not None, done.error
        assert (done.stored.layers[2] / "c").read_bytes() == text
    assert [done.moved_bytes for done in await run(*names, refresh=True)] == [0, 0]


async def test_hard_link_to_nothing_is_one_clear_error(
    registry: Any, push: Push, make_image: Make, run: Run, store: Store
) -> None:
    image = make_image("a", make_tar(hardlink("b", "nowhere")))
    await push(image, "swe/task")
    told = failure(await run(f"{registry.host}/swe/task"))
    assert "links to 'nowhere', which no layer holds | push the image anew" in told
    assert list((store.root / "names").glob("*")) == []


async def test_second_pull_asks_nothing(
    faulty: Any, push: Push, make_image: Make, run: Run
) -> None:
    await push(make_image("a"), "swe/task")
    await run(f"{faulty.host}/swe/task")
    asked = len(faulty.asked)
    (done,) = await run(f"{faulty.host}/swe/task")
    assert (done.moved_bytes, len(faulty.asked)) == (0, asked)


async def test_refresh_follows_a_tag_that_moved(
    registry: Any, push: Push, make_image: Make, run: Run
) -> None:
    await push(make_image("old"), "swe/task")
    await run(f"{registry.host}/swe/task")
    new = make_image("new")
    await push(new, "swe/task")
    (kept,) = await run(f"{registry.host}/swe/task")
    (fresh,) = await run(f"{registry.host}/swe/task", refresh=True)
    assert kept.stored is not None
    assert fresh.stored is not None
    assert kept.stored.digest != fresh.stored.digest == new.manifest.digest


async def test_layer_that_images_share_comes_once(
    faulty: Any, push: Push, make_image: Make, run: Run, store: Store
) -> None:
    for number in range(4):
        await push(make_image("base", f"own {number}"), f"swe/task{number}")
    await run(*(f"{faulty.host}/swe/task{number}" for number in range(4)))
    base = make_image("base", "own 0").layers[0]
    assert sum(base in line for line in faulty.asked) == 1
    assert len(list((store.root / "layers").iterdir())) == 5


async def test_index_is_reduced_to_this_machine(
    registry: Any,
    push: Push,
    make_image: Make,
    make_index: Make,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amd, arm = make_image("amd"), make_image("arm")
    index = make_index(arm64=arm.manifest, amd64=amd.manifest)
    for image in (amd, arm):
        await push(image, "swe/task", image.manifest.digest)
    await push(type(amd)({}, index), "swe/task", "multi")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (done,) = await run(f"{registry.host}/swe/task:multi@{index.digest}")
    assert done.stored is not None
    assert done.stored.digest == arm.manifest.digest


async def test_rewrite_reads_from_a_mirror_and_keeps_the_name(
    registry: Any, push: Push, make_image: Make, run: Run, store: Store
) -> None:
    image = make_image("a")
    await push(image, "hub/swe/task", "v1")
    await run("swe/task:v1", rewrites={"docker.io/": f"{registry.host}/hub/"})
    assert store.find("docker.io/swe/task:v1").digest == image.manifest.digest
    (named,) = store.names()
    assert named.source == f"{registry.host}/hub/swe/task@{image.manifest.digest}"


async def test_local_images_are_left_alone(run: Run) -> None:
    assert await run("host", "built:a", "dir:/b") == []


async def test_name_that_is_no_name_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="is no image name"):
        await run("Not/A Name")


async def test_login_of_docker_config_opens_a_closed_registry(
    guarded: Callable[..., Any], make_image: Make, run: Run, tmp_path: Path
) -> None:
    async with guarded(make_image("a"), "ann:secret") as host:
        for login, words in (("", "docker login"), ("ann:wrong", "docker login")):
            config = docker_config(tmp_path, host, login)
            assert words in failure(await run(f"{host}/swe/task", docker_config=config))
        config = docker_config(tmp_path, host, "ann:secret")
        (done,) = await run(f"{host}/swe/task", docker_config=config)
        assert done.stored is not None


def docker_config(folder: Path, host: str, login: str) -> Path:
    config = folder / "docker.json"
    auth = base64.b64encode(login.encode()).decode()
    config.write_text(json.dumps({"auths": {host: {"auth": auth}} if login else {}}))
    return config


# Registries that misbehave


def status(code: int, **headers: str) -> Any:
    return lambda *_: web.Response(status=code, headers=headers)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _, body: web.Response(body=b"x" * len(body)), "sent other content than"),
        (lambda _, body: web.Response(body=body[: len(body) // 2]), "bytes of swe/task@"),
        (lambda _, body: web.Response(body=body * 2), "sent more than"),
        (lambda _, body: web.Response(body=b""), "sent 0 of"),
        (status(404), "has no swe/task@"),
        (status(401), "docker login"),
        (status(403), "docker login"),
        (status(429), "limits how often"),
        (status(500), "answers 500"),
    ],
    ids=["bytes", "half", "more", "nothing", "404", "401", "403", "429", "500"],
)
async def test_blob_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, run: Run, store: Store, fault: Any, words: str
) -> None:
    image = make_image("a", "b")
    await push(image, "swe/task")
    faulty.answers[image.layers[1]] = fault
    assert words in failure(await run(f"{faulty.host}/swe/task", workers=1))
    assert not (store.root / "names").exists()
    assert [*(store.root / "work").iterdir()] == []
    faulty.answers.clear()
    (healed,) = await run(f"{faulty.host}/swe/task")
    assert healed.stored is not None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (status(404), "has no swe/task:latest"),
        (status(401), "docker login"),
        (status(429), "limits how often"),
        (status(502), "answers 502"),
        (lambda *_: _manifest(b"{"), "is not JSON"),
        (lambda *_: _manifest(b"[]"), "no JSON object"),
        (lambda *_: _manifest(b"{}"), "lacks"),
        (lambda *_: _manifest(b'{"config": 3, "layers": []}'), "is garbled"),
        (lambda *_: _manifest(_body(digest="sha256:../../../../etc/passwd")), "no SHA-256"),
        (lambda *_: _manifest(_body(size=-5)), "less than no bytes"),
        (lambda *_: web.Response(text="<html>", content_type="text/html"), "text/html"),
        (lambda *_: web.Response(body=bytes(5 << 20)), "larger than 4 MiB"),
    ],
    ids=[
        "404", "401", "429", "502", "no JSON", "list", "empty", "numbers", "path", "size", "page",
        "huge",
    ],
)  # fmt: skip
async def test_manifest_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, run: Run, store: Store, fault: Any, words: str
) -> None:
    await push(make_image("a"), "swe/task")
    faulty.answers["/manifests/latest"] = fault
    assert words in failure(await run(f"{faulty.host}/swe/task"))
    assert leftovers(store) == []


def _manifest(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=IMAGE_TYPES[0])


def _body(digest: str = "sha256:" + "0" * 64, size: int = 5) -> bytes:
    entry = {"digest": digest, "size": size}
    return json.dumps({"config": entry, "layers": [entry]}).encode()


async def test_wrong_digest_in_the_name_is_not_found(
    registry: Any, push: Push, make_image: Make, run: Run
) -> None:
    await push(make_image("a"), "swe/task")
    digest = sha256(b"another")
    assert "has no swe/task@sha256" in failure(await run(f"{registry.host}/swe/task@{digest}"))


async def test_manifest_of_another_digest_is_refused(
    faulty: Any, push: Push, make_image: Make, run: Run
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    faulty.answers[image.manifest.digest] = lambda _, body: web.Response(body=body + b" ")
    done = await run(f"{faulty.host}/swe/task@{image.manifest.digest}")
    assert "sent other content than" in failure(done)


async def test_registry_that_is_not_there_is_one_error(run: Run, store: Store) -> None:
    assert "does not answer" in failure(await run("127.0.0.1:9/swe/task"))
    assert leftovers(store) == []


async def test_missing_image_stops_no_other(
    registry: Any, push: Push, make_image: Make, run: Run
) -> None:
    await push(make_image("a"), "swe/good")
    done = await run(f"{registry.host}/swe/gone", f"{registry.host}/swe/good")
    assert "has no swe/gone:latest" in failure(done)
    assert [each.image for each in done if each.stored] == [f"{registry.host}/swe/good"]


async def test_rate_limit_is_waited_out_as_long_as_asked(
    faulty: Any, push: Push, make_image: Make, run: Run
) -> None:
    await push(make_image("a"), "swe/task")

    def busy(*_: Any) -> web.StreamResponse:
        faulty.answers.clear()
        return web.Response(status=429, headers={"Retry-After": "0"})

    faulty.answers["/manifests/latest"] = busy
    (done,) = await run(f"{faulty.host}/swe/task")
    assert done.stored is not None


async def test_broken_connection_is_resumed_where_it_broke(
    faulty: Any, push: Push, run: Run, make_image: Make
) -> None:
    image = make_image(os.urandom(300_000).hex())
    await push(image, "swe/task")
    layer = image.layers[0]
    faulty.answers[layer] = cut_once(faulty)
    (done,) = await run(f"{faulty.host}/swe/task")
    assert done.stored is not None
    asked = [line for line in faulty.asked if layer in line]
    assert len(asked) == 2
    assert "bytes=" in asked[1]


async def test_registry_without_ranges_is_asked_for_all(
    faulty: Any, push: Push, run: Run, make_image: Make
) -> None:
    image = make_image(os.urandom(300_000).hex())
    await push(image, "swe/task")
    cut = cut_once(faulty)

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if "Range" not in request.headers:
            return await cut(request, body)
        return web.Response(body=image.blobs[image.layers[0]])

    faulty.answers[image.layers[0]] = answer
    faulty.clear = False
    (done,) = await run(f"{faulty.host}/swe/task")
    assert done.stored is not None


async def test_rotten_beginning_is_fetched_anew(
    registry: Any, push: Push, run: Run, make_image: Make, store: Store
) -> None:
    image = make_image(os.urandom(300_000).hex())
    await push(image, "swe/task")
    partial = store.partial(image.layers[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"rot" * 1000)
    (done,) = await run(f"{registry.host}/swe/task")
    assert done.stored is not None


def cut_once(faulty: Any) -> Any:
    async def half(request: web.Request, body: bytes) -> web.StreamResponse:
        if getattr(faulty, "clear", True):
            faulty.answers.clear()
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.close()
        return response

    return half


# Images that lie or attack


@pytest.mark.parametrize(
    ("blob", "tar", "words"),
    [
        (gzip.compress(make_tar(Entry("../out"))), make_tar(Entry("../out")), "leads out"),
        (gzip.compress(make_tar(Entry("a"))), make_tar(Entry("b")), "unpacks to"),
        (gzip.compress(make_tar(Entry("a")))[:-9], make_tar(Entry("a")), "ends in the middle"),
        (b"\x1f\x8bnonsense" * 9, make_tar(Entry("a")), "damaged"),
    ],
    ids=["escape", "diff id", "cut gzip", "bad gzip"],
)
async def test_layer_that_cannot_be_unpacked_leaves_nothing(
    registry: Any,
    push: Push,
    run: Run,
    store: Store,
    make_image: Make,
    blob: bytes,
    tar: bytes,
    words: str,
) -> None:
    await push(forged(make_image("x"), blob, sha256(tar)), "swe/task")
    assert words in failure(await run(f"{registry.host}/swe/task"))
    assert leftovers(store) == []
    assert not store.blob(sha256(blob)).exists()


async def test_config_of_another_image_is_refused(
    registry: Any, push: Push, run: Run, store: Store, make_image: Make
) -> None:
    blob = gzip.compress(make_tar(Entry("a")))
    await push(forged(make_image("x"), blob, "sha256:short"), "swe/task")
    assert "no SHA-256 digest" in failure(await run(f"{registry.host}/swe/task"))
    await push(forged(make_image("x"), blob), "swe/task")
    assert "names 0 layers, its manifest 1" in failure(await run(f"{registry.host}/swe/task"))
    assert leftovers(store) == []


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


# Kills


PULL = """
import asyncio, sys
from pathlib import Path
from swerl.images.pull import pull
from swerl.oci.store import Store
print("begun", flush=True)
done = asyncio.run(pull(sys.argv[2:], Store(Path(sys.argv[1]))))
sys.exit(any(each.error for each in done))
"""


def child(store: Store, *images: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PULL, str(store.root), *images]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


async def test_pull_killed_at_any_moment_goes_on(
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
    assert [*(store.root / "work").iterdir(), *(store.root / "partial").iterdir()] == []


async def test_two_processes_bring_a_blob_once(
    faulty: Any, push: Push, make_image: Make, store: Store
) -> None:
    image = make_image(*(os.urandom(400_000).hex() for _ in range(4)))
    await push(image, "swe/task")
    children = [child(store, f"{faulty.host}/swe/task") for _ in range(2)]
    codes = [await asyncio.to_thread(each.wait, 30) for each in children]
    assert codes == [0, 0]
    for layer in image.layers:
        assert sum(layer in line for line in faulty.asked) == 1


@pytest.fixture
def guarded() -> Callable[..., Any]:
    """A registry of one image that wants a login."""

    @asynccontextmanager
    async def serve(image: Any, login: str) -> AsyncIterator[str]:
        wanted = "Basic " + base64.b64encode(login.encode()).decode()

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Authorization") != wanted:
                return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
            if "/manifests/" in request.path:
                return web.Response(body=image.manifest.body, content_type=IMAGE_TYPES[0])
            return web.Response(body=image.blobs[request.path.rpartition("/")[2]])

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    return serve


async def test_damaged_manifest_in_the_store_is_not_believed(
    registry: Any, push: Push, make_image: Make, run: Run, store: Store
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    store.blob(store.put(image.manifest.body)).write_bytes(b"{")
    (done,) = await run(f"{registry.host}/swe/task")
    assert done.stored is not None
    assert store.blob(image.manifest.digest).read_bytes() == image.manifest.body
