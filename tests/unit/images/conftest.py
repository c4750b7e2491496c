"""A real registry on loopback, images made by hand, and a proxy that misbehaves on demand."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from swerl.core.image_reference import parse_target
from swerl.images.http import Patience, RegistryOptions, http_session
from swerl.images.manifest import IMAGE_TYPES, INDEX_TYPES, Blob, Manifest, sha256
from swerl.images.mirror import mirror
from swerl.images.pull import Pulled, PullOptions, pull
from swerl.images.registry import Registry
from swerl.images.store import Store
from swerl.images.unpack import unpack
from tests.services import registry as services_registry
from tests.services.daemon import CannotRunError
from tests.unit.images.layers import Entry, MirrorReport, layer_file, make_tar

RETURNED = ("Content-Type", "Docker-Content-Digest")


@dataclass
class Server:
    """A running registry: its address and where it keeps its files."""

    host: str
    folder: Path

    def half_written(self) -> list[Path]:
        """Content of uploads that were begun and neither finished nor cancelled.

        docker-registry leaves an empty hash state of a cancelled upload behind; only data counts.
        """
        return list(self.folder.rglob("_uploads/*/data"))


@dataclass
class Image:
    """An image made in memory."""

    blobs: dict[str, bytes]
    manifest: Manifest

    @property
    def layers(self) -> list[str]:
        return [entry["digest"] for entry in json.loads(self.manifest.body)["layers"]]


@dataclass
class Faults:
    """What a proxy does to the next requests: path ending -> the answer to give instead."""

    host: str
    answers: dict[str, Callable[[web.BaseRequest, bytes], web.StreamResponse]] = field(
        default_factory=dict
    )
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def start_registry() -> Iterator[Callable[..., Server]]:
    """Start registries on free loopback ports; all stop with the test."""
    with ExitStack() as started:

        def start() -> Server:
            try:
                daemon = services_registry.start()
            except CannotRunError as error:
                pytest.skip(str(error))
            started.callback(daemon.stop)
            return Server(daemon.address, daemon.folder)

        yield start


@pytest.fixture
def registry(start_registry: Callable[..., Server]) -> Server:
    """An empty registry without logins."""
    return start_registry()


@pytest.fixture
def push(registry: Server, tmp_path: Path) -> Callable[..., Awaitable[None]]:
    """Push an image to `registry` with the project's own client."""

    async def push(image: Image, repository: str, tag: str = "latest") -> None:
        async with http_session() as http:
            client = Registry(registry.host, http, tmp_path / "no-config.json")
            for digest, data in image.blobs.items():
                await client.upload(repository, Blob(digest, len(data)), _chunks(data))
            await client.put_manifest(repository, tag, image.manifest)

    return push


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def bring(store: Store, tmp_path: Path) -> Callable[..., Awaitable[list[Pulled]]]:
    """Pull images into `store`, without long waits and without logins."""

    async def call(*images: str, **settings: Any) -> list[Pulled]:
        settings = {"docker_config": tmp_path / "none.json", **settings}
        options = PullOptions(patience=Patience(tries=3, first_wait_s=0.001), **settings)
        return await pull(images, store, options=options)

    return call


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Awaitable[MirrorReport]]:
    """Mirror images to a target, without long waits and without logins."""

    async def call(images: list[str], to: str, **settings: Any) -> MirrorReport:
        settings = {"docker_config": tmp_path / "none.json", **settings}
        options = RegistryOptions(patience=Patience(tries=3, first_wait_s=0.001), **settings)
        lock = tmp_path / "lock.json"
        return MirrorReport(await mirror(images, parse_target(to), lock, options=options))

    return call


@pytest.fixture
def make_image() -> Callable[..., Image]:
    """Make an OCI image of one layer per text, or per tar."""
    return _image


@pytest.fixture
def make_index() -> Callable[..., Manifest]:
    """Make an index of manifests by architecture."""
    return _index


@pytest.fixture
async def faulty(registry: Server) -> AsyncIterator[Faults]:
    """A proxy before `registry` that answers as told in `answers` and forwards the rest."""
    faults = Faults(host="")

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        faults.asked.append(f"{request.method} {request.path}")
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method,
                f"http://{registry.host}{request.raw_path}",
                headers={"Accept": request.headers.get("Accept", "*/*")},
            ) as real,
        ):
            body = await real.read()
            for ending, answer in faults.answers.items():
                if request.path.endswith(ending):
                    given = answer(request, body)
                    return await given if isawaitable(given) else given
            headers = {k: real.headers[k] for k in RETURNED if k in real.headers}
            return web.Response(status=real.status, body=body, headers=headers)

    async with RawTestServer(handle) as server:
        faults.host = f"127.0.0.1:{server.port}"
        yield faults


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    return path


@pytest.fixture
def run(tmp_path: Path, tree: Path) -> Callable[..., int]:
    """Unpack a layer of these entries into `tree`."""

    def call(*entries: Entry) -> int:
        file, diff_id = layer_file(tmp_path / "layer.tar.gz", *entries)
        return unpack(file, tree, diff_id)

    return call


def _image(*contents: str | bytes, architecture: str = "amd64") -> Image:
    layers = [_layer(content) for content in contents]
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "rootfs": {
                "type": "layers",
                "diff_ids": [sha256(gzip.decompress(layer)) for layer in layers],
            },
        }
    ).encode()
    layer_type = "application/vnd.oci.image.layer.v1.tar+gzip"
    body = {
        "schemaVersion": 2,
        "mediaType": IMAGE_TYPES[0],
        "config": _entry(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [_entry(layer, layer_type) for layer in layers],
    }
    blobs = {sha256(data): data for data in (config, *layers)}
    return Image(blobs, Manifest("made", json.dumps(body).encode(), IMAGE_TYPES[0]))


def _index(**manifests: Manifest) -> Manifest:
    entries = [
        {**_entry(found.body, found.media_type), "platform": {"os": "linux", "architecture": name}}
        for name, found in manifests.items()
    ]
    body = {"schemaVersion": 2, "mediaType": INDEX_TYPES[0], "manifests": entries}
    return Manifest("made", json.dumps(body).encode(), INDEX_TYPES[0])


def _layer(content: str | bytes) -> bytes:
    if isinstance(content, str):
        content = make_tar(Entry("etc/motd", content.encode(), mtime=0))
    return gzip.compress(content, mtime=0)


def _entry(data: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": sha256(data), "size": len(data)}


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data
