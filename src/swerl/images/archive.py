"""Import an OCI image layout, a folder or a tar of one: its blobs go into the store unchanged."""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swerl.core.errors import ImageError, InputError
from swerl.core.files import unpack_tarball
from swerl.core.image_reference import checked_digest, parse
from swerl.images.manifest import (
    IMAGE_TYPES,
    MAX_DOCUMENT,
    Manifest,
    machine_platform,
    read_config,
    sha256,
)
from swerl.images.store import Named, Store, StoredImage

_NAME_KEYS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Found:
    """An image of an archive, its blobs in the store, and its names in the archive."""

    manifest: Manifest
    names: Sequence[str] = ()


def import_images(path: Path, store: Store, *, name: str = "") -> list[StoredImage]:
    """Import a layout and return its images under their own names, or one as `name`.

    Raises InputError if it is no layout or its images have no name, and ImageError if it is
    damaged; the store then has none of the names.
    """
    if name:
        parse(name)
    try:
        with _opened(path, store) as layout, ExitStack() as uses:
            images = list(_images(_Import(store, layout, uses), path))
            manifests = _named(images, name, path)
            for manifest in manifests.values():
                _unpack(manifest, store, uses)
            for reference, manifest in manifests.items():
                store.name(Named(reference, manifest.digest, "", time.time()))
        return [store.find(reference) for reference in manifests]
    except (AttributeError, TypeError) as error:
        raise ImageError(f"{path} is damaged: {error}", hint="save the image again") from error
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        message = f"cannot import {path}: {error.strerror or error}"
        hint = "free some space in the store" if full else "check the file and its permissions"
        raise ImageError(message, hint=hint) from error


class _Import:
    """Moves files of one archive into a store, and marks them as in use until `uses` ends."""

    def __init__(self, store: Store, layout: Path, uses: ExitStack) -> None:
        self.store = store
        self._layout = layout.resolve()
        self._uses = uses

    def document(self, name: str) -> bytes:
        """Return a small file. Raises ImageError if it is absent or large."""
        with self._open(name) as file:
            body = file.read(MAX_DOCUMENT + 1)
        if len(body) > MAX_DOCUMENT:
            raise ImageError(
                f"{name} is larger than {MAX_DOCUMENT >> 20} MiB",
                hint="images do not need that much; save it again",
            )
        return body

    def blob(self, name: str, digest: str) -> None:
        """Store a file. Raises ImageError if it has another digest."""
        with self._open(name) as file, self.store.owner().scratch() as folder:
            if _copy(file, folder / "blob") != digest:
                raise ImageError(
                    f"{digest} of the archive does not match its content",
                    hint="it is damaged; save the image again",
                )
            self._use(digest)
            self.store.adopt(folder / "blob", digest)

    def put(self, data: bytes) -> None:
        self._use(sha256(data))
        self.store.put(data)

    def _open(self, name: str) -> IO[bytes]:
        path = (self._layout / name).resolve()
        if not path.is_relative_to(self._layout) or not path.is_file():
            raise ImageError(f"the archive lacks {name}", hint="save the image again")
        return path.open("rb")

    def _use(self, digest: str) -> None:
        self._uses.enter_context(self.store.owner().using([digest]))


def _images(source: _Import, path: Path) -> Iterator[_Found]:
    try:
        index = source.document("index.json")
    except ImageError as error:
        raise InputError(
            f"{path} is not an OCI image layout",
            hint=f"make one with `skopeo copy docker-archive:{path} oci-archive:image.tar`",
        ) from error
    for entry in _list(_json(index, "index.json"), "manifests"):
        platform = entry.get("platform")
        if platform and (platform.get("os"), platform.get("architecture")) != machine_platform():
            continue
        manifest = _manifest(source, entry.get("digest"), path)
        if manifest.is_index:
            manifest = _manifest(source, manifest.platform_digest(machine_platform()), path)
        for blob in manifest.blobs():
            if not source.store.has_blob(blob):
                source.blob(_blob_path(blob.digest), blob.digest)
        source.put(manifest.body)
        notes = entry.get("annotations") or {}
        names = [str(notes[key]) for key in _NAME_KEYS if key in notes]
        yield _Found(manifest, [name for name in names if "/" in name or ":" in name][:1])


def _manifest(source: _Import, digest: object, path: Path) -> Manifest:
    digest = checked_digest(digest, str(path))
    body = source.document(_blob_path(digest))
    if sha256(body) != digest:
        raise ImageError(
            f"{digest} of {path} does not match its content",
            hint="it is damaged; save the image again",
        )
    kind = _json(body, digest).get("mediaType") or IMAGE_TYPES[0]
    return Manifest(f"{path}@{digest}", body, str(kind))


def _named(images: Sequence[_Found], name: str, path: Path) -> dict[str, Manifest]:
    """Return the images by full name. Raises InputError if they have none."""
    if not images:
        platform = "/".join(machine_platform())
        raise InputError(
            f"{path} has no image for {platform}", hint="save the image for that platform"
        )
    if name and len(images) > 1:
        raise InputError(
            f"{path} has {len(images)} images, which cannot all be named {name}",
            hint="omit the name, or save one image",
        )
    pairs = [
        (str(parse(reference)), image.manifest)
        for image in images
        for reference in ([name] if name else image.names)
    ]
    if not pairs:
        raise InputError(
            f"the image in {path} has no name", hint=f"append one: oci-archive:{path}:NAME"
        )
    return dict(pairs)


def _unpack(manifest: Manifest, store: Store, uses: ExitStack) -> None:
    body = store.read(manifest.config().digest, manifest.name)
    config = read_config(body, manifest)
    config.require_platform(machine_platform(), manifest.name)
    diff_ids = config.diff_ids
    uses.enter_context(store.owner().using(diff_ids))
    for number, blob in enumerate(manifest.layers()):
        store.add_layer(blob.digest, diff_ids[number])


def _copy(source: IO[bytes], to: Path) -> str:
    """Copy an open file and return its digest."""
    digest = hashlib.sha256()
    with to.open("wb") as out:
        while block := source.read(_BLOCK):
            digest.update(block)
            out.write(block)
    return "sha256:" + digest.hexdigest()


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _json(body: bytes, what: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ImageError(
            f"{what} of the archive is not JSON", hint="save the image again"
        ) from error


def _list(document: Any, key: str) -> list[Mapping[str, Any]]:
    entries = document.get(key) if isinstance(document, dict) else None
    if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
        return entries
    raise ImageError(f"the archive's list of {key} is malformed", hint="save the image again")


@contextmanager
def _opened(path: Path, store: Store) -> Iterator[Path]:
    """Yield the folder of a layout; a tar is unpacked into the store meanwhile.

    Raises InputError if it is neither, and OSError.
    """
    if path.is_dir():
        yield path
        return
    with store.owner().scratch() as folder:
        try:
            unpack_tarball(path, folder)
        except FileNotFoundError as error:
            raise InputError(f"file {path} does not exist", hint="check its name") from error
        except ValueError as error:
            raise InputError(
                f"{path} is neither a folder nor a tar",
                hint="write one with `skopeo copy … oci-archive:FILE`",
            ) from error
        yield folder
