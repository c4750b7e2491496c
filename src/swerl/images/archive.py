"""Import the image of an OCI layout, a folder or a tar of one; its blobs stay unchanged."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swerl.core.errors import ImageError, InputError
from swerl.core.files import unpack_tarball
from swerl.core.image_reference import parse
from swerl.images.manifest import (
    IMAGE_TYPES,
    INDEX_TYPES,
    Blob,
    Manifest,
    declared_type,
    machine_platform,
    sha256,
)
from swerl.images.pull import store_image
from swerl.images.registry import verified
from swerl.images.store import Store, StoredImage

_BLOCK = 1 << 20


async def import_image(path: Path, store: Store, name: str) -> StoredImage:
    """Import a layout's first image for this machine as `name`.

    Raises InputError if it is no layout, and ImageError if it is damaged or has no such image; the
    store then lacks the name.
    """
    reference = str(parse(name))
    with _opened(path, store) as folder:
        layout = _Layout(path, folder.resolve())
        await store_image(reference, layout.manifest(), layout.blob, store)
    return store.find(reference)


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
        index = self._file("index.json").read_bytes()
        manifest = Manifest(str(self.path), index, INDEX_TYPES[0])
        while manifest.is_index:
            digest = manifest.platform_digest(machine_platform())
            body = self._file(_blob_path(digest)).read_bytes()
            if sha256(body) != digest:
                message = f"{self.path} sent content that does not match {digest}"
                raise ImageError(message, hint="save the image again")
            manifest = Manifest(str(self.path), body, declared_type(body) or IMAGE_TYPES[0])
        return manifest

    def blob(self, blob: Blob) -> AsyncGenerator[bytes]:
        """Yield a verified blob in pieces. Raises ImageError."""
        pieces = self._pieces(_blob_path(blob.digest))
        return verified(pieces, blob, source=str(self.path), what=blob.digest)

    async def _pieces(self, name: str) -> AsyncIterator[bytes]:
        with self._file(name).open("rb") as file:
            while block := file.read(_BLOCK):
                yield block

    def _file(self, name: str) -> Path:
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder) or not path.is_file():
            raise ImageError(f"{self.path} lacks {name}", hint="save the image again")
        return path


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


@contextmanager
def _opened(path: Path, store: Store) -> Iterator[Path]:
    """Yield the folder of a layout; a tar is unpacked into the store meanwhile.

    Raises InputError if it is neither.
    """
    if path.is_dir():
        yield path
        return
    with store.scratch() as folder:
        try:
            unpack_tarball(path, folder)
        except (OSError, ValueError) as error:
            hint = "write one with `skopeo copy … oci-archive:FILE`"
            message = f"{path} cannot be read as a folder or a tar: {error}"
            raise InputError(message, hint=hint) from error
        yield folder
