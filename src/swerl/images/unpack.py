"""Unpack a layer into a folder that overlayfs can use as a lower directory.

Names and links of a layer are untrusted: see `layer_folder.py`. Devices and extended attributes are
dropped: a sandbox has its own devices, and an attribute could forge overlayfs's marks.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import tarfile
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from swerl.core.errors import ImageError, install_command
from swerl.images.layer_folder import FileMeta, Folder

BOMB_RATIO = 64
"""Most bytes per compressed byte. Layers of programs have 2 to 5."""
BOMB_FLOOR = 1 << 30
"""Bytes that any layer may unpack to: a small layer of a few zeroed files is not a bomb."""
_BLOCK = 1 << 20
_EXTENSIONS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_MAX_EXTENSION = 1 << 20
"""Most bytes of one: Linux allows 64 KiB of attributes and a name of 4 KiB."""
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_MALFORMED = {
    errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
}  # fmt: skip
"""Errors caused by the content of a layer, not by the disk."""
_UNTRUSTED = "do not trust this image; other layers may be worse"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


def unpack(
    file: Path,
    into: Path,
    diff_id: str,
    *,
    stop: threading.Event | None = None,
) -> int:
    """Unpack a layer file (a tar, plain or gzip or zstd) into an empty folder.

    Returns the bytes of its files, holes included. Raises ImageError for damage, another diff id,
    names that lead out or below a link, a hard link to a file that the layer lacks, or once `stop`
    is set, and OSError for a full disk; the folder then holds part of the layer.
    """
    max_bytes = max(BOMB_FLOOR, BOMB_RATIO * file.stat().st_size)
    try:
        with file.open("rb") as packed, Folder(into) as folder:
            stream = _LayerStream(packed, max_bytes, stop)
            num_bytes = _fill(folder, stream, max_bytes)
            actual = stream.finish()
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise ImageError(
            f"a layer is not a tar archive: {error}", hint="push the image again"
        ) from error
    except OSError as error:
        message, hint = f"a layer cannot be unpacked: {error}", ""
        if error.errno in _MALFORMED:
            hint = "push the image again: its names or links are inconsistent"
        elif error.errno in {errno.EOPNOTSUPP, errno.EPERM}:
            hint = "overlays need attributes and Linux 5.8: set SWERL_CACHE to ext4 or xfs"
        if not hint:
            raise
        raise ImageError(message, hint=hint) from error
    if actual != diff_id:
        raise ImageError(
            f"a layer unpacks to {actual}, not to {diff_id} as the image's config says",
            hint="its config belongs to another image; push it again",
        )
    return num_bytes


def _fill(folder: Folder, stream: _LayerStream, max_bytes: int) -> int:
    num_bytes = 0
    source = cast(Any, stream)  # tarfile needs only `read` for a stream
    with tarfile.open(
        fileobj=source,
        mode="r|",
        bufsize=_BLOCK,
        encoding="utf-8",
        errors="surrogateescape",
        tarinfo=_Entry,
    ) as tar:
        while (entry := tar.next()) is not None:
            cast(Any, tar).members.clear()  # else they grow without bound
            path = _path(entry.name)
            name = path.rpartition(b"/")[2]
            if name.startswith(_WHITEOUT):
                _whiteout(folder, path, name)
            elif entry.isreg():
                num_bytes += max(entry.size, 0)
                if num_bytes > max_bytes:  # a sparse file
                    raise _bomb(max_bytes)
                file = cast(Any, tar.extractfile(entry)).raw  # its buffer would copy twice
                folder.write(path, iter(partial(file.read, _BLOCK), b""), _meta(entry))
            else:
                _special(folder, path, entry)
    return num_bytes


class _Entry(tarfile.TarInfo):
    """An entry with bounded long names and attributes, which are read at once."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type in _EXTENSIONS and not 0 <= self.size <= _MAX_EXTENSION:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return cast(Any, super())._proc_member(tar)


def _special(folder: Folder, path: bytes, entry: tarfile.TarInfo) -> None:
    """Make an entry that is not a regular file."""
    if entry.isdir():
        folder.make_folder(path, _meta(entry))
    elif entry.issym():
        folder.symlink(path, _encoded(entry.linkname), _meta(entry))
    elif entry.islnk():
        folder.link(path, _path(entry.linkname))
    elif entry.isfifo():
        folder.fifo(path, _meta(entry))


def _whiteout(folder: Folder, path: bytes, name: bytes) -> None:
    parent = path.rpartition(b"/")[0]
    hidden = name.removeprefix(_WHITEOUT)
    if name == _OPAQUE:
        folder.make_opaque(parent)
    elif hidden in {b"", b".", b".."}:
        raise ImageError(f"a layer removes {name!r}, which is not a file name", hint=_UNTRUSTED)
    elif not hidden.startswith(_WHITEOUT):  # other double marks belong to an old driver
        folder.hide(b"/".join(filter(None, (parent, hidden))))


def _meta(entry: tarfile.TarInfo) -> FileMeta:
    return FileMeta(entry.mode, entry.mtime)


def _path(name: str) -> bytes:
    """Return a name's path below the folder. Raises ImageError if it leads out."""
    parts = [part for part in _encoded(name).split(b"/") if part not in {b"", b"."}]
    if b".." in parts:
        raise ImageError(f"a layer has {name!r:.120}, a name that leads out of it", hint=_UNTRUSTED)
    return b"/".join(parts)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _bomb(max_bytes: int) -> ImageError:
    message = f"a layer unpacks to more than {max_bytes >> 20} MiB"
    hint = "far more than its compressed size allows; do not trust this image"
    return ImageError(message, hint=hint)


class _LayerStream:
    """Hashes and counts what is read of a layer's tar."""

    def __init__(self, file: BinaryIO, max_bytes: int, stop: threading.Event | None) -> None:
        self._source, self._errors = _decompressed(file)
        self._sum = hashlib.sha256()
        self._left_bytes = self._max_bytes = max_bytes
        self._stop = stop

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, none at the end. Raises ImageError for damage."""
        if self._stop and self._stop.is_set():
            raise ImageError("unpacking a layer was stopped", hint="run the same command again")
        try:
            data = self._source.read(size)
        except self._errors as error:
            raise ImageError(
                f"a layer's compressed data is damaged: {error}",
                hint="run the same command again to fetch it again; else push the image again",
            ) from error
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise _bomb(self._max_bytes)
        self._sum.update(data)
        return data

    def finish(self) -> str:
        """Read the rest and return the digest of everything."""
        while self.read(_BLOCK):
            pass
        return "sha256:" + self._sum.hexdigest()


def _decompressed(file: BinaryIO) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    """Return the tar of a layer file and the errors of damage, by the file's first bytes."""
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP):
        errors = (EOFError, zlib.error, gzip.BadGzipFile)
        return cast(BinaryIO, gzip.GzipFile(fileobj=file)), errors
    if head == _ZSTD:
        library = _zstandard()
        reader = library.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return reader, (library.ZstdError,)
    return file, ()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImageError(
            "a layer is packed with zstd, which needs the package `zstandard`",
            hint=install_command("zstd"),
        ) from error
    return zstandard
