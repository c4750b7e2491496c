"""Expert ids in plain files: written once, named by offset, length and checksum, mapped by ranks.

A token of a large model has hundreds of bytes of them, so whatever else stands on disk, such as
`trajectory.json` and the file of a Batch, says only where they lie. Files are never changed in
place, so that what was named stays as it was.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from mmap import ACCESS_READ, mmap
from pathlib import Path

from swerl.core.errors import RunError
from swerl.core.files import disk_errors
from swerl.core.turn import RoutedExperts, StoredBytes

NAME = "experts.bin"
"""The file of an Episode, beside its trajectory."""


def append(path: Path, piece: RoutedExperts) -> RoutedExperts:
    """Write a record at a file's end and return it as it lies there; threads may do so at once.

    Raises RunError.
    """
    [data] = read([piece])
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset = file.tell() - len(data)  # where the system put it, whoever else appends
    return replace(piece, data=StoredBytes(path, offset, len(data), zlib.crc32(data)))


def store(path: Path, pieces: Sequence[RoutedExperts]) -> list[RoutedExperts]:
    """Make a file of these records, whole or not at all, in place of one that was there.

    No records leave no file. One that holds all of them already is not copied where the disk knows
    links. Raises RunError, also where a record is damaged.
    """
    files = _files(pieces)
    if files == {path}:
        return list(pieces)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with disk_errors(path):
        if not pieces:
            path.unlink(missing_ok=True)
            return []
        temporary.unlink(missing_ok=True)
        try:
            stored = _linked(temporary, files, pieces) or [append(temporary, p) for p in pieces]
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return [_moved(piece, path) for piece in stored]


def check(pieces: Sequence[RoutedExperts]) -> None:
    """Raise RunError where a file of these records is missing or cut off. Reads none of them."""
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
    """Return the ids of records, those in files as parts of a map that lives as long as they do.

    Raises RunError where a file is missing or cut off, or a record is not what was written.
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
    """Give the one file that holds all of the records another name; None where that cannot be."""
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
        at = f"the {where.num_bytes} bytes at {where.offset} are not those that were written"
        raise _damaged(where.file, at)
    return part


def _damaged(path: Path, why: str) -> RunError:
    message = f"cannot read the experts in {path}: {why}"
    owner = path.parent if path.name == NAME else path
    return RunError(message, hint=f"delete {owner}; the same command makes it again")
