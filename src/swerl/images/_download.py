"""Brings one blob from a registry into the store; what arrived before a break is kept."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from swerl.core.errors import ImageError
from swerl.images._registry import Registry
from swerl.images.oci.manifest import Blob
from swerl.images.oci.store import Store

_BLOCK = 1 << 20
_LOOK_S = 0.1
"""Seconds between looks at whether another process has brought the blob."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


async def download(
    registry: Registry,
    repository: str,
    blob: Blob,
    store: Store,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Bring a blob unless it is there; return the bytes moved, which `on_bytes` hears of too.

    One attempt. It goes on where an earlier one broke off, where the registry can. A blob of
    another size or digest leaves nothing. Raises ImageError.
    """
    try:
        async with _alone(store, blob) as file:
            if file is None:
                return 0
            return await _download(registry, repository, blob, file, on_bytes)
    except OSError as error:
        store.partial(blob.digest).unlink(missing_ok=True)
        full = error.errno in _FULL
        hint = "free some, or run `swerl images gc --keep TASKS`" if full else "check its rights"
        raise ImageError(
            f"no space is left in {store.root}" if full else f"cannot write a blob: {error}",
            hint=hint,
        ) from error


async def _download(
    registry: Registry,
    repository: str,
    blob: Blob,
    file: BinaryIO,
    on_bytes: Callable[[int], None],
) -> int:
    found = await asyncio.to_thread(_hash_of, file)
    start, moved = file.tell(), 0
    if start >= blob.size:  # whole but not renamed, or nonsense: it costs little to begin anew
        start, found = _rewind(file)
    async with registry.open_blob(repository, blob, start) as body:
        if body.offset != start:
            start, found = _rewind(file)
        async for chunk in body.chunks:
            found.update(chunk)
            _write(file, chunk)
            moved += len(chunk)
            on_bytes(len(chunk))
    try:
        registry.check(repository, blob, start + moved, f"sha256:{found.hexdigest()}")
    except ImageError as error:
        if start + moved < blob.size:
            raise
        _rewind(file)
        if start:  # the earlier part may be what is wrong
            raise ImageError(str(error), hint=error.hint, retryable=True) from error
        raise
    return moved


@asynccontextmanager
async def _alone(store: Store, blob: Blob) -> AsyncIterator[BinaryIO | None]:
    """Open the blob's partial file for this task alone; None where the blob is there.

    The file's lock keeps other tasks and processes waiting, and falls with its owner. Left
    without an error, the file becomes the blob; left empty, it goes.
    """
    path = store.partial(blob.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    while not store.has_blob(blob):
        with path.open("a+b", buffering=0) as file:
            if not _lock(file) or not _is_at(file, path):
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                yield file
                store.adopt(path, blob.digest)
            finally:
                if _is_at(file, path) and os.fstat(file.fileno()).st_size == 0:
                    path.unlink()
            return
    yield None


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Say whether the path still names this file: whoever had it may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _hash_of(file: BinaryIO) -> hashlib._Hash:
    """Read a file to its end and return its hash."""
    found = hashlib.sha256()
    file.seek(0)
    while block := file.read(_BLOCK):
        found.update(block)
    return found


def _write(file: BinaryIO, data: bytes) -> None:
    """Write all of it: on a disk that is almost full a write may take less and say so."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _rewind(file: BinaryIO) -> tuple[int, hashlib._Hash]:
    file.truncate(0)
    file.seek(0)
    return 0, hashlib.sha256()
