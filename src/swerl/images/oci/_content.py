"""The bytes of files: read in pieces, written with their digest, holes as holes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_ZEROS = bytes(1 << 20)


def pieces_of(path: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield a file's content by offset."""
    with Path(os.fsdecode(path)).open("rb") as file:
        while data := file.read(len(_ZEROS)):
            yield file.tell() - len(data), data


def fill(fd: int, pieces: Iterable[tuple[int, bytes]], size: int) -> str:
    """Write pieces at their offsets and return the SHA-256 of the whole file, holes as zeros."""
    found, end = hashlib.sha256(), 0
    for offset, data in pieces:
        _add_zeros(found, offset - end)
        found.update(data)
        view = memoryview(data)
        end = offset + len(data)
        while view:
            view = view[os.pwrite(fd, view, end - len(view)) :]
    if end < size:
        os.ftruncate(fd, size)
        _add_zeros(found, size - end)
    return found.hexdigest()


def _add_zeros(found: hashlib._Hash, count: int) -> None:
    while count > 0:
        found.update(_ZEROS[:count])
        count -= len(_ZEROS)
