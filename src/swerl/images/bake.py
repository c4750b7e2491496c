"""Add one layer with agent CLIs to many images of a registry, without running or pulling them.

Each image gets a new config and manifest; its own layers stay, and the agents' layer is stored once
and shared.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from swerl.core.errors import ImageError
from swerl.core.image_reference import Reference, parse
from swerl.core.jobs import run_jobs
from swerl.core.sandbox import Mount
from swerl.images.http import RegistryOptions, http_session
from swerl.images.manifest import Blob, Manifest, read_config, sha256
from swerl.images.mirror import LockFile, Mirrored, Pinned
from swerl.images.registry import Registries

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


async def bake(
    images: Mapping[str, Pinned],
    layer: AgentLayer,
    lock_file: Path,
    *,
    options: RegistryOptions | None = None,
    on_done: Callable[[Mirrored], None] = lambda _: None,
) -> list[Mirrored]:
    """Make a copy of each image with the layer on top, in the image's own repository.

    `images` are task image -> its copy in a registry that accepts pushes, as in the lock file of
    `mirror`. The new copies go to `lock_file`. A copy that exists is not made again. An image that
    fails is reported and stops no other. Raises ImageError if the file cannot be written.
    """
    options = options or RegistryOptions()
    lock = LockFile(lock_file)
    lock.save()
    async with http_session() as http:
        registries = Registries(http, options)

        async def one(item: tuple[str, Pinned]) -> Mirrored:
            image, pinned = item
            try:
                baked = await _bake(image, pinned, layer, registries)
            except ImageError as error:
                return Mirrored(image, error=error)
            if baked.pinned:
                lock.put(image, baked.pinned)
            return baked

        try:
            return await run_jobs(images.items(), one, limit=options.workers, on_done=on_done)
        finally:
            lock.save()


async def _bake(image: str, pinned: Pinned, layer: AgentLayer, registries: Registries) -> Mirrored:
    """Make the copy of one image. Raises ImageError."""
    place = parse(pinned.reference)
    registry, repository = registries.at(place.registry), place.repository
    base = await registries.patiently(lambda: registry.manifest(repository, pinned.digest))
    if base.media_type not in _LAYER_TYPES:
        raise ImageError(
            f"{place} has a media type that accepts no layer: {base.media_type}",
            hint="mirror it first: that selects one platform",
        )

    async def read_config_blob() -> bytes:
        return b"".join([piece async for piece in registry.blob(repository, base.config())])

    body = await registries.patiently(read_config_blob)
    read_config(body, base)
    config = _with_layer(json.loads(body), layer)
    baked = _manifest_with(base, config, layer)
    moved_bytes = 0
    was_there = await registries.patiently(lambda: registry.has_manifest(repository, baked.digest))
    if not was_there:
        if await registries.push_blob(place, layer.blob, layer.pieces):
            moved_bytes = layer.blob.size
        await registries.push_blob(place, baked.config(), lambda: _once(config))
        tag = f"{_short(pinned.digest)}-{_short(layer.blob.digest)}"
        await registries.patiently(lambda: registry.put_manifest(repository, tag, baked))
    reference = Reference(place.registry, repository, digest=baked.digest)
    size_bytes = sum(blob.size for blob in baked.blobs())
    result = Pinned(pinned.reference, baked.digest, str(reference), size_bytes)
    return Mirrored(image, result, was_there=was_there, moved_bytes=moved_bytes)


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


async def _once(data: bytes) -> AsyncGenerator[bytes]:
    yield data


@dataclass(frozen=True, slots=True)
class AgentLayer:
    """A compressed tar of agent CLIs on disk; equal files make equal bytes on every machine."""

    path: Path
    blob: Blob
    diff_id: str
    """Digest of the tar before compression, as an image's config lists it."""
    agents: tuple[str, ...]
    """Its contents, such as `claude-code@2.1.112`."""

    async def pieces(self) -> AsyncGenerator[bytes]:
        with self.path.open("rb") as file:
            while piece := file.read(_CHUNK):
                yield piece


def make_layer(mounts: Sequence[Mount], agents: Sequence[str], path: Path) -> AgentLayer:
    """Write the mounted folders as a layer to the file `path`. Raises ImageError."""
    unpacked = path.with_suffix(".tar")
    try:
        with tarfile.open(unpacked, "w") as tar:
            for source, name in sorted(_entries(mounts), key=lambda entry: entry[1]):
                _add(tar, source, name)
        with (
            unpacked.open("rb") as data,
            path.open("wb") as file,
            gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
        ):
            shutil.copyfileobj(data, packed, _CHUNK)
        diff_id = _digest(unpacked)
        unpacked.unlink()
        return AgentLayer(path, Blob(_digest(path), path.stat().st_size), diff_id, tuple(agents))
    except OSError as error:
        raise ImageError(
            f"cannot write the agents' layer {path}: {error.strerror or error}",
            hint="free some space there",
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


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
