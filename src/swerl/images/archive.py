"""Import the image of an OCI layout, a folder or a tar of one; its blobs stay unchanged."""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swerl.core.errors import ImageError, InputError
from swerl.core.files import unpack_tarball
from swerl.core.image_reference import parse
from swerl.images.manifest import (
    IMAGE_TYPES,
    INDEX_TYPES,
    MAX_DOCUMENT,
    Manifest,
    declared_type,
    machine_platform,
    sha256,
)
from swerl.images.store import Named, Store, StoredImage

_BLOCK = 1 << 20
_AGAIN = "save the image again"


def import_image(path: Path, store: Store, name: str) -> StoredImage:
    """Import a layout's first image for this machine as `name`.

    Raises InputError if it is no layout, and ImageError if it is damaged or has no such image; the
    store then lacks the name.
    """
    reference = str(parse(name))
    try:
        with _opened(path, store) as folder:
            _import(_Layout(path, folder.resolve()), store, reference)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        message = f"cannot import {path}: {error.strerror or error}"
        hint = "free some space in the store" if full else "check the file and its permissions"
        raise ImageError(message, hint=hint) from error
    return store.find(reference)


def _import(layout: _Layout, store: Store, reference: str) -> None:
    manifest = layout.manifest()
    blobs = manifest.blobs()
    with store.owner().using([manifest.digest, *(blob.digest for blob in blobs)]):
        store.put(manifest.body)
        for blob in blobs:
            if not store.has_blob(blob):
                layout.copy(blob.digest, store)
        config = store.config(manifest)
        config.require_platform(machine_platform(), manifest.name)
        with store.owner().using(config.diff_ids):
            for blob, diff_id in zip(manifest.layers(), config.diff_ids, strict=True):
                store.add_layer(blob.digest, diff_id)
            store.name(Named(reference, manifest.digest, "", time.time()))


@dataclass(frozen=True, slots=True)
class _Layout:
    """An unpacked layout."""

    path: Path
    """The file or folder that the user named."""
    folder: Path

    def manifest(self) -> Manifest:
        """Return the manifest of its first image for this machine. Raises ImageError."""
        if not (self.folder / "index.json").is_file():
            hint = f"`skopeo copy docker-archive:{self.path} oci-archive:image.tar` makes one"
            raise InputError(f"{self.path} is not an OCI image layout", hint=hint)
        manifest = Manifest(str(self.path), self._read("index.json"), INDEX_TYPES[0])
        while manifest.is_index:
            digest = manifest.platform_digest(machine_platform())
            body = self._read(_blob_path(digest))
            if sha256(body) != digest:
                raise self._damaged(digest)
            manifest = Manifest(str(self.path), body, declared_type(body) or IMAGE_TYPES[0])
        return manifest

    def copy(self, digest: str, store: Store) -> None:
        """Copy a blob to the store. Raises ImageError if its content has another digest."""
        actual = hashlib.sha256()
        with store.owner().scratch() as scratch:
            source = self._file(_blob_path(digest))
            with source.open("rb") as file, (scratch / "blob").open("wb") as out:
                while block := file.read(_BLOCK):
                    actual.update(block)
                    out.write(block)
            if f"sha256:{actual.hexdigest()}" != digest:
                raise self._damaged(digest)
            store.adopt(scratch / "blob", digest)

    def _read(self, name: str) -> bytes:
        """Return a small file. Raises ImageError if it is absent or large."""
        with self._file(name).open("rb") as file:
            body = file.read(MAX_DOCUMENT + 1)
        if len(body) > MAX_DOCUMENT:
            message = f"{name} of {self.path} is larger than {MAX_DOCUMENT >> 20} MiB"
            raise ImageError(message, hint="images do not need that much; save it again")
        return body

    def _file(self, name: str) -> Path:
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder) or not path.is_file():
            raise ImageError(f"{self.path} lacks {name}", hint=_AGAIN)
        return path

    def _damaged(self, digest: str) -> ImageError:
        return ImageError(f"{digest} of {self.path} does not match its content", hint=_AGAIN)


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


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
