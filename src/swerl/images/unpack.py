"""Unpack a layer into a folder that overlayfs can use as a lower directory.

Names and links of a layer are untrusted: see `layer_folder.py`. Devices and extended attributes are
dropped: a sandbox has its own devices, and an attribute could forge overlayfs's marks.
"""

from __future__ import annotations

import errno
import hashlib
import tarfile
import threading
import zlib
from collections.abc import Generator, Iterator
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
_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_DAMAGED = "run the same command again to fetch it again; else push the image again"


def unpack(
    file: Path,
    into: Path,
    diff_id: str,
    *,
    stop: threading.Event | None = None,
) -> int:
    """Unpack a layer file (a tar, plain or gzip or zstd) into an empty folder.

    Returns the bytes of its files, holes included. Raises ImageError for damage, another diff id,
    names that lead out, a hard link to a file that the layer lacks, a full disk, or once `stop` is
    set; the folder then holds part of the layer.
    """
    max_bytes = max(BOMB_FLOOR, BOMB_RATIO * file.stat().st_size)
    stream = LayerStream(file, max_bytes=max_bytes, stop=stop)
    try:
        with Folder(into) as folder:
            num_bytes = _fill(folder, stream, max_bytes)
            actual = stream.finish()
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise ImageError(
            f"a layer is not a tar archive: {error}", hint="push the image again"
        ) from error
    except OSError as error:
        raise _failed(error, into) from error
    finally:
        stream.close()
    if actual != diff_id:
        raise ImageError(
            f"a layer unpacks to {actual}, not to {diff_id} as the image's config says",
            hint="its config belongs to another image; push it again",
        )
    return num_bytes


def _fill(folder: Folder, stream: LayerStream, max_bytes: int) -> int:
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
                _refuse_bomb(num_bytes, max_bytes)
                folder.write(path, _content(tar, entry), _meta(entry))
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


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> Iterator[tuple[int, bytes]]:
    """Yield the data of a file by offset; gaps are holes."""
    stream = cast(Any, tar.fileobj)
    stream.seek(entry.offset_data)
    segments = cast(Any, entry.sparse) or [(0, entry.size)]
    for start, size in segments:
        num_read = 0
        while num_read < size:
            data = stream.read(min(size - num_read, _BLOCK))
            if not data:
                raise tarfile.ReadError("it ends within a file")
            yield start + num_read, data
            num_read += len(data)


def _meta(entry: tarfile.TarInfo) -> FileMeta:
    return FileMeta(entry.mode, entry.size if entry.isreg() else 0, entry.mtime)


def _path(name: str) -> bytes:
    """Return a name's path below the folder. Raises ImageError if it leads out."""
    parts = [part for part in _encoded(name).split(b"/") if part not in {b"", b"."}]
    if b".." in parts:
        raise ImageError(f"a layer has {name!r:.120}, a name that leads out of it", hint=_UNTRUSTED)
    return b"/".join(parts)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _refuse_bomb(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        message = f"a layer's files take more than {max_bytes >> 20} MiB"
        hint = "far more than its compressed size allows; do not trust this image"
        raise ImageError(message, hint=hint)


def _failed(error: OSError, into: Path) -> ImageError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        message = f"no space is left to unpack a layer in {into.parent.parent}"
        return ImageError(message, hint="free some, or run `swerl images gc --keep TASKS`")
    message = f"a layer cannot be unpacked: {error}"
    if error.errno in _MALFORMED:
        return ImageError(message, hint="push the image again: its names or links are inconsistent")
    if error.errno in {errno.EOPNOTSUPP, errno.EPERM}:
        hint = "overlays need attributes and Linux 5.8: set SWERL_CACHE to a folder on ext4 or xfs"
        return ImageError(message, hint=hint)
    return ImageError(message, hint=f"check the disk and the permissions of {into.parent}")


class LayerStream:
    """Reads the tar of a layer file: gzip, zstd or plain, identified by its first bytes."""

    def __init__(self, file: Path, *, max_bytes: int, stop: threading.Event | None = None) -> None:
        """Raises ImageError after `max_bytes` uncompressed bytes or `stop`."""
        self._sum = hashlib.sha256()
        self._pieces = self._read_pieces(file, max_bytes, stop)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, none at the end. Raises ImageError for damage."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        head, self._rest = self._rest[:size], self._rest[size:]
        return bytes(head)

    def finish(self) -> str:
        """Read the rest and return the digest of everything. Raises ImageError."""
        while self.read(_PIECE):
            pass
        return "sha256:" + self._sum.hexdigest()

    def close(self) -> None:
        self._pieces.close()

    def _read_pieces(
        self, path: Path, max_bytes: int, stop: threading.Event | None
    ) -> Generator[bytes]:
        size = 0
        with path.open("rb") as file:
            for piece in _decompressed(file):
                if stop and stop.is_set():
                    hint = "run the same command again"
                    raise ImageError("unpacking a layer was stopped", hint=hint)
                size += len(piece)
                if size > max_bytes:
                    message = f"a layer unpacks to more than {max_bytes >> 20} MiB"
                    hint = "far more than its compressed size allows; do not trust this image"
                    raise ImageError(message, hint=hint)
                self._sum.update(piece)
                yield piece


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP):
        return _gunzip(file)
    if head == _ZSTD:
        return _unzstd(file)
    return iter(lambda: file.read(_PIECE), b"")


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of consecutive gzip members; zeros may follow, as gzip allows."""
    decoder = zlib.decompressobj(wbits=31)
    data = b""
    try:
        while data := data or file.read(_PIECE // 4):
            if decoder.eof:
                data = data.lstrip(b"\0")
                decoder = zlib.decompressobj(wbits=31) if data else decoder
                continue
            if piece := decoder.decompress(data, _PIECE):
                yield piece
            data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        while piece := decoder.decompress(b"", _PIECE):
            yield piece
    except zlib.error as error:
        raise ImageError(f"a layer's gzip data is damaged: {error}", hint=_DAMAGED) from error
    if not decoder.eof:
        raise ImageError("a layer's gzip data is cut short", hint=_DAMAGED)


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    library = _zstandard()
    try:
        reader = library.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        while piece := reader.read(_PIECE):
            yield piece
    except library.ZstdError as error:
        raise ImageError(f"a layer's zstd data is damaged: {error}", hint=_DAMAGED) from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImageError(
            "a layer is packed with zstd, which needs the package `zstandard`",
            hint=install_command("zstd"),
        ) from error
    return zstandard
