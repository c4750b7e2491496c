"""Expert ids in plain files: written once, mapped by ranks; the spool of open Sessions.

A token of a large model has hundreds of bytes of expert ids. Other files, such as `trajectory.json`
and the file of a Batch, therefore store only file, offset, length and checksum. Files are never
changed in place, so these references stay valid.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path

from swerl.core.errors import RunError
from swerl.core.files import disk_errors, replacing
from swerl.core.turn import RoutedExperts, StoredBytes

NAME = "experts.bin"
"""The file of an Episode, beside its trajectory."""


def append(path: Path, piece: RoutedExperts) -> RoutedExperts:
    """Append a record to a file and return its reference; threads may append at the same time.

    Raises RunError.
    """
    [data] = read([piece])
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset = file.tell() - len(
                data
            )  # the position that the kernel chose: others may append, too
    return replace(piece, data=StoredBytes(path, offset, len(data), zlib.crc32(data)))


def store(path: Path, pieces: Sequence[RoutedExperts]) -> list[RoutedExperts]:
    """Write a file of these records atomically; it replaces an older one.

    Without records there is no file. A file with exactly these records is linked and not copied, if
    the disk supports links. Raises RunError, also if a record is damaged.
    """
    files = _files(pieces)
    if files == {path}:
        return list(pieces)
    if not pieces:
        with disk_errors(path):
            path.unlink(missing_ok=True)
        return []
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        stored = _linked(temporary, files, pieces) or [append(temporary, p) for p in pieces]
    return [_moved(piece, path) for piece in stored]


def check(pieces: Sequence[RoutedExperts]) -> None:
    """Raise RunError if a file of these records is missing or truncated. Reads no record."""
    ends: dict[Path, int] = {}
    for piece in pieces:
        if isinstance(where := piece.data, StoredBytes):
            ends[where.file] = max(ends.get(where.file, 0), where.offset + where.num_bytes)
    for path, end in ends.items():
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error
        if size < end:
            raise _damaged(path, f"it has {size} bytes of {end}")


def read(pieces: Sequence[RoutedExperts]) -> list[bytes | memoryview]:
    """Return the ids of records; those in files are views of a memory map.

    Raises RunError if a file is missing or truncated, or a record's checksum differs.
    """
    check(pieces)
    maps = {path: _mapped(path) for path in _files(pieces)}
    return [
        _part(maps[piece.data.file], piece.data)
        if isinstance(piece.data, StoredBytes)
        else piece.data
        for piece in pieces
    ]


def _files(pieces: Sequence[RoutedExperts]) -> set[Path]:
    return {piece.data.file for piece in pieces if isinstance(piece.data, StoredBytes)}


def _linked(
    path: Path, files: set[Path], pieces: Sequence[RoutedExperts]
) -> list[RoutedExperts] | None:
    """Link the one file with all of the records to `path`; None if that is impossible."""
    if len(files) != 1 or not all(isinstance(piece.data, StoredBytes) for piece in pieces):
        return None
    with suppress(OSError):
        path.hardlink_to(*files)
        return list(pieces)
    return None


def _moved(piece: RoutedExperts, path: Path) -> RoutedExperts:
    assert isinstance(piece.data, StoredBytes)
    return replace(piece, data=replace(piece.data, file=path))


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            is_empty = not os.fstat(file.fileno()).st_size
            return memoryview(b"" if is_empty else mmap(file.fileno(), 0, access=ACCESS_READ))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _part(whole: memoryview, where: StoredBytes) -> memoryview:
    part = whole[where.offset : where.offset + where.num_bytes]
    if zlib.crc32(part) != where.checksum:
        at = f"the checksum of the {where.num_bytes} bytes at {where.offset} differs"
        raise _damaged(where.file, at)
    return part


def _damaged(path: Path, why: str) -> RunError:
    message = f"cannot read the experts in {path}: {why}"
    owner = path.parent if path.name == NAME else path
    return RunError(message, hint=f"delete {owner}; the same command creates it again")


@dataclass(frozen=True, slots=True)
class ExpertSpool:
    """Expert ids of open Sessions on disk, one file per Session, so that memory stays bounded.

    The writer of an Episode links the Session's file and drops it here. Opening a run removes the
    files of a killed one. Any thread or process of this machine may write.
    """

    folder: Path

    def keep(self, session: str, piece: RoutedExperts) -> RoutedExperts:
        """Store a reply's record and return its reference; return it unchanged if the disk refuses.

        The agent still gets its reply; writing the Episode then reports the full disk.
        """
        try:
            return append(self._file(session), piece)
        except RunError:
            return piece

    def drop(self, session: str) -> None:
        """Delete a Session's file; other links to it stay."""
        with suppress(OSError):
            self._file(session).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, session: str) -> Path:
        return self.folder / f"{session}.bin"


@contextmanager
def open_spool(folder: Path) -> Iterator[ExpertSpool]:
    """Open an empty spool and delete it at the end."""
    spool = ExpertSpool(folder)
    spool.clear()
    try:
        yield spool
    finally:
        spool.clear()
