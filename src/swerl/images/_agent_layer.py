"""One image layer that holds agent CLIs: the same bytes for the same files, whoever makes it."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from swerl.core.errors import ImageError
from swerl.core.sandbox import Mount
from swerl.images.oci.manifest import Blob

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CHUNK = 1 << 20
_LEVEL = 6
"""gzip's own default: level 9 takes three times as long for one percent."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed tar on disk."""

    path: Path
    blob: Blob
    diff_id: str
    """Digest of the tar before compression, as an image's config lists it."""
    agents: tuple[str, ...]
    """What it holds, such as `claude-code@2.1.112`."""


def make_layer(mounts: Sequence[Mount], agents: Sequence[str], path: Path) -> Layer:
    """Write the mounted folders as a layer to the file `path`. Raises ImageError."""
    plain = hashlib.sha256()
    try:
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
            tarfile.open(mode="w|", fileobj=_Tee(packed, plain.update)) as tar,
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
    return Layer(path, blob, f"sha256:{plain.hexdigest()}", tuple(agents))


def chunks(layer: Layer) -> Iterator[bytes]:
    """Yield the layer's bytes."""
    with layer.path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _entries(mounts: Iterable[Mount]) -> Iterator[tuple[Path, str]]:
    """Yield (host path, name in the tar); of a target's parents only those that are swerl's own."""
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
    if member.islnk():  # a second name of a file that the tar has under another: give it again
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", source.stat().st_size
    if not member.isreg():
        tar.addfile(member)
        return
    with source.open("rb") as file:
        tar.addfile(member, file)


class _Tee(io.RawIOBase):
    """A file that hashes what is written to it."""

    def __init__(self, file: gzip.GzipFile, update: Callable[[bytes], object]) -> None:
        super().__init__()
        self._file = file
        self._update = update

    def write(self, data: Buffer) -> int:
        self._update(bytes(data))
        return self._file.write(data)
