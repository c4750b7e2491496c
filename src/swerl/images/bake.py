"""Add one layer with agent CLIs to many images of a registry, without running or pulling them.

Each image gets a new config and manifest; its own layers stay, and the agents' layer is stored once
and shared.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import aiohttp

from swerl.core.errors import ImageError
from swerl.core.image_reference import Reference, parse
from swerl.core.jobs import run_jobs
from swerl.core.sandbox import Mount
from swerl.images.http import Patience, http_session
from swerl.images.manifest import Blob, Manifest, read_config, sha256
from swerl.images.mirror import LockFile, Pinned
from swerl.images.registry import Registries

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LABEL = "swerl.agents"
_LAYER_TYPES = {
    "application/vnd.oci.image.manifest.v1+json": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.distribution.manifest.v2+json": (
        "application/vnd.docker.image.rootfs.diff.tar.gzip"
    ),
}
"""Media type of a manifest -> media type of its gzip layers."""
_CHUNK = 1 << 20
_LEVEL = 6
"""gzip's own default: level 9 takes three times as long for one percent."""


@dataclass(frozen=True, slots=True)
class Baked:
    """The result for one image: `pinned`, or the `error` that stopped it."""

    image: str
    pinned: Pinned | None = None
    error: ImageError | None = None


async def bake(
    images: Mapping[str, Pinned],
    layer: AgentLayer,
    lock_file: Path,
    *,
    docker_config: Path,
    workers: int = 4,
    on_done: Callable[[Baked], None] = lambda _: None,
) -> list[Baked]:
    """Make a copy of each image with the layer on top, in the image's own repository.

    `images` are task image -> its copy in a registry that accepts pushes, as in the lock file of
    `mirror`. The new copies go to `lock_file`. A copy that exists is not made again. An image that
    fails is reported and stops no other. Raises ImageError if the file cannot be written.
    """
    lock = LockFile(lock_file)
    lock.save()
    async with http_session() as http:
        bake_run = _BakeRun(http, layer, docker_config)

        async def one(item: tuple[str, Pinned]) -> Baked:
            image, pinned = item
            try:
                baked = await bake_run.bake(pinned)
            except ImageError as error:
                return Baked(image, error=error)
            lock.put(image, baked)
            return Baked(image, baked)

        try:
            return await run_jobs(images.items(), one, limit=workers, on_done=on_done)
        finally:
            lock.save()


class _BakeRun:
    """One run: its registries, and a repository of each that has the agents' layer."""

    def __init__(self, http: aiohttp.ClientSession, layer: AgentLayer, docker_config: Path) -> None:
        self._registries = Registries(http, docker_config, Patience())
        self._layer = layer
        self._homes: dict[str, str] = {}
        self._storing = asyncio.Lock()

    async def bake(self, pinned: Pinned) -> Pinned:
        place = parse(pinned.reference)
        registry, repository = self._registries.at(place.registry), place.repository
        patiently = self._registries.patiently
        base = await patiently(lambda: registry.manifest(repository, pinned.digest))
        config = _with_layer(await self._config(place, base), self._layer)
        baked = _manifest_with(base, config, self._layer)
        if not await patiently(lambda: registry.has_manifest(repository, baked.digest)):
            await self._store_layer(place)
            await self._store(place, Blob(sha256(config), len(config)), lambda: [config])
            tag = f"{_short(pinned.digest)}-{_short(self._layer.blob.digest)}"
            await patiently(lambda: registry.put_manifest(repository, tag, baked))
        reference = Reference(place.registry, repository, digest=baked.digest)
        size_bytes = sum(blob.size for blob in baked.blobs())
        return Pinned(pinned.reference, baked.digest, str(reference), size_bytes)

    async def _config(self, place: Reference, base: Manifest) -> dict[str, Any]:
        if base.media_type not in _LAYER_TYPES:
            raise ImageError(
                f"{place} has a media type that accepts no layer: {base.media_type}",
                hint="mirror it first: that selects one platform",
            )
        registry, blob = self._registries.at(place.registry), base.config()

        async def fetch() -> bytes:
            return b"".join([part async for part in registry.blob(place.repository, blob)])

        body = await self._registries.patiently(fetch)
        read_config(body, base)
        return dict(json.loads(body))

    async def _store_layer(self, place: Reference) -> None:
        async with self._storing:
            blob, home = self._layer.blob, self._homes.get(place.registry)
            mounted = home is not None and await self._registries.patiently(
                lambda: self._registries.at(place.registry).mount(
                    place.repository, blob.digest, home=home
                )
            )
            if not mounted:
                await self._store(place, blob, lambda: chunks(self._layer))
            self._homes[place.registry] = place.repository

    async def _store(
        self, place: Reference, blob: Blob, read: Callable[[], Iterable[bytes]]
    ) -> None:
        registry, repository = self._registries.at(place.registry), place.repository
        if not await self._registries.patiently(lambda: registry.has_blob(repository, blob.digest)):
            await self._registries.patiently(
                lambda: registry.upload(repository, blob, _stream(read()))
            )


def _with_layer(config: dict[str, Any], layer: AgentLayer) -> bytes:
    agents = ", ".join(layer.agents)
    config["rootfs"]["diff_ids"].append(layer.diff_id)
    if history := config.get("history"):  # one step per layer, or none
        step = {"created_by": f"swerl images bake {agents}", "created": config.get("created")}
        config["history"] = [*history, step]
    inner = config["config"] = dict(config.get("config") or {})
    inner["Labels"] = {**(inner.get("Labels") or {}), _LABEL: agents}
    return json.dumps(config, separators=(",", ":")).encode()


def _manifest_with(base: Manifest, config: bytes, layer: AgentLayer) -> Manifest:
    document: dict[str, Any] = json.loads(base.body)
    kind = _LAYER_TYPES[base.media_type]
    added = {"mediaType": kind, "size": layer.blob.size, "digest": layer.blob.digest}
    document["config"] |= {"digest": sha256(config), "size": len(config)}
    document["layers"] = [*document["layers"], added]
    body = json.dumps(document, separators=(",", ":")).encode()
    return Manifest(base.name, body, base.media_type)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


async def _stream(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@dataclass(frozen=True, slots=True)
class AgentLayer:
    """A compressed tar of agent CLIs on disk; equal files make equal bytes on every machine."""

    path: Path
    blob: Blob
    diff_id: str
    """Digest of the tar before compression, as an image's config lists it."""
    agents: tuple[str, ...]
    """Its contents, such as `claude-code@2.1.112`."""


def make_layer(mounts: Sequence[Mount], agents: Sequence[str], path: Path) -> AgentLayer:
    """Write the mounted folders as a layer to the file `path`. Raises ImageError."""
    diff_hash = hashlib.sha256()
    try:
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
            tarfile.open(mode="w|", fileobj=_Tee(packed, diff_hash.update)) as tar,
        ):
            for source, name in sorted(_entries(mounts), key=lambda entry: entry[1]):
                _add(tar, source, name)
    except OSError as error:
        raise ImageError(
            f"cannot write the agents' layer {path}: {error.strerror or error}",
            hint="free some space there",
        ) from error
    with path.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    blob = Blob(f"sha256:{digest}", path.stat().st_size)
    return AgentLayer(path, blob, f"sha256:{diff_hash.hexdigest()}", tuple(agents))


def chunks(layer: AgentLayer) -> Iterator[bytes]:
    with layer.path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _entries(mounts: Iterable[Mount]) -> Iterator[tuple[Path, str]]:
    """Yield (host path, name in the tar). Of a target's parent folders only swerl's own are
    included."""
    for mount in mounts:
        target = PurePosixPath(mount.target.lstrip("/"))
        yield mount.source, str(target)
        for folder, subfolders, files in os.walk(mount.source):
            for name in (*subfolders, *files):
                path = Path(folder, name)
                yield path, str(target / path.relative_to(mount.source))


def _add(tar: tarfile.TarFile, source: Path, name: str) -> None:
    member = tar.gettarinfo(source, name)
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = "root"
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    if member.islnk():  # a hard link: store the content again
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", source.stat().st_size
    if not member.isreg():
        tar.addfile(member)
        return
    with source.open("rb") as file:
        tar.addfile(member, file)


class _Tee(io.RawIOBase):
    """A file that hashes the bytes written to it."""

    def __init__(self, file: gzip.GzipFile, update: Callable[[bytes], object]) -> None:
        super().__init__()
        self._file = file
        self._update = update

    def write(self, data: Buffer) -> int:
        self._update(bytes(data))
        return self._file.write(data)
