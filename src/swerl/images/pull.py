"""Pull images from registries into the store, ready for sandboxes.

Per image, the manifest is read and reduced to this machine's platform. Each layer that the store
lacks is downloaded, verified and unpacked, several at once. The name is written last, so an image
is complete or absent. Shared layers are fetched once. The same command continues where it stopped:
whole blobs are kept, and partial ones resume if the registry can.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from swerl.core.errors import ImageError
from swerl.core.image_reference import Reference, is_local, parse
from swerl.core.jobs import run_jobs
from swerl.images.http import RegistryOptions, http_session
from swerl.images.manifest import Blob, Manifest, machine_platform, read_config
from swerl.images.mirror import rewritten
from swerl.images.registry import Registries, Registry
from swerl.images.store import Named, Store, StoredImage

_BLOCK = 1 << 20
_LOOK_S = 0.1
"""Seconds between checks whether another process has downloaded the blob."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class PullOptions(RegistryOptions):
    refresh: bool = False
    """True asks the registry again for names that are in the store: tags move."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result for one image: `stored`, or the `error` that stopped it."""

    image: str
    stored: StoredImage | None = None
    error: ImageError | None = None
    moved_bytes: int = 0
    """Bytes downloaded for it."""


async def pull(
    images: Iterable[str],
    store: Store,
    *,
    options: PullOptions | None = None,
    on_done: Callable[[Pulled], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Pulled]:
    """Pull images; one that fails is reported and stops no other.

    `on_bytes` gets the number of bytes of each piece. Raises InputError if a name is malformed.
    """
    options = options or PullOptions()
    names = [name for name in dict.fromkeys(images) if not is_local(name)]
    for name in names:
        parse(name)
    await asyncio.to_thread(store.remove_leftovers)
    async with http_session() as http:
        registries = Registries(http, options.docker_config, options.patience, store)
        run = _PullRun(store, registries, options, on_bytes)
        return await run_jobs(names, run.image, limit=options.workers, on_done=on_done)


async def pull_one(image: str, store: Store, *, options: PullOptions | None = None) -> StoredImage:
    """Pull one image and return it. Raises ImageError."""
    (pulled,) = await pull([image], store, options=options)
    if pulled.error:
        raise pulled.error
    return store.find(image)


class _PullRun:
    """One pull: its store, its registries, and the layers under way."""

    def __init__(
        self,
        store: Store,
        registries: Registries,
        options: PullOptions,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._store = store
        self._registries = registries
        self._options = options
        self._on_bytes = on_bytes
        self._layers: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(options.workers)

    async def image(self, image: str) -> Pulled:
        if not self._options.refresh:
            with suppress(ImageError):
                return Pulled(image, self._store.find(image))
        try:
            moved = await self._image(image)
            return Pulled(image, self._store.find(image), moved_bytes=moved)
        except ImageError as error:
            return Pulled(image, error=error)
        except OSError as error:
            message = f"cannot write the store {self._store.root}: {error.strerror}"
            return Pulled(image, error=ImageError(message, hint="check its permissions and space"))

    async def _image(self, image: str) -> int:
        source = rewritten(image, self._options.rewrites)
        manifest = await self._registries.manifest(source, machine_platform())
        parts = [manifest.digest, *(blob.digest for blob in manifest.blobs())]
        with self._store.owner().using(parts):
            moved = await self._blob(source, manifest.config())
            config = read_config(self._store.read(manifest.config().digest, image), manifest)
            config.require_platform(machine_platform(), image)
            with self._store.owner().using(config.diff_ids):
                moved += await self._all(source, manifest, config.diff_ids)
                digest = self._store.put(manifest.body)
                origin = str(source.pinned(digest))
                self._store.name(Named(str(parse(image)), digest, origin, time.time()))
        return moved

    async def _all(self, source: Reference, manifest: Manifest, diff_ids: tuple[str, ...]) -> int:
        layers = dict(zip(diff_ids, manifest.layers(), strict=True))

        async def one(layer: tuple[str, Blob]) -> int:
            return await self._layer(source, *layer)

        return sum(await run_jobs(layers.items(), one, limit=self._options.workers))

    async def _layer(self, source: Reference, diff_id: str, blob: Blob) -> int:
        async with self._layers[diff_id], self._slots:
            if self._store.has_layer(diff_id):
                return 0
            moved = await self._blob(source, blob)
            stop = threading.Event()
            try:
                await asyncio.to_thread(self._store.add_layer, blob.digest, diff_id, stop=stop)
            except asyncio.CancelledError:
                stop.set()  # the thread itself cannot be cancelled
                raise
            except ImageError:
                self._store.blob(blob.digest).unlink(missing_ok=True)
                raise
            return moved

    async def _blob(self, source: Reference, blob: Blob) -> int:
        registry = self._registries.at(source.registry)
        return await self._registries.patiently(
            lambda: download(registry, source.repository, blob, self._store, self._on_bytes)
        )


async def download(
    registry: Registry,
    repository: str,
    blob: Blob,
    store: Store,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Download a blob unless it exists; return the bytes moved, which `on_bytes` gets too.

    One attempt. It resumes an earlier one if the registry can. A blob of another size or digest is
    discarded. Raises ImageError.
    """
    try:
        async with _alone(store, blob) as file:
            if file is None:
                return 0
            return await _download(registry, repository, blob, file, on_bytes)
    except OSError as error:
        store.partial(blob.digest).unlink(missing_ok=True)
        full = error.errno in _FULL
        hint = (
            "free some, or run `swerl images gc --keep TASKS`" if full else "check its permissions"
        )
        raise ImageError(
            f"no space is left in {store.root}" if full else f"cannot write a blob: {error}",
            hint=hint,
        ) from error


async def _download(
    registry: Registry, repository: str, blob: Blob, file: BinaryIO, on_bytes: Callable[[int], None]
) -> int:
    digest = await asyncio.to_thread(_hash_of, file)
    start, moved = file.tell(), 0
    if start >= blob.size:  # whole but not renamed, or too long: start again
        start, digest = _rewind(file)
    async with registry.open_blob(repository, blob, start) as body:
        if body.offset != start:
            start, digest = _rewind(file)
        async for chunk in body.chunks:
            digest.update(chunk)
            _write(file, chunk)
            moved += len(chunk)
            on_bytes(len(chunk))
    try:
        registry.check(repository, blob, start + moved, f"sha256:{digest.hexdigest()}")
    except ImageError as error:
        if start + moved < blob.size:
            raise
        _rewind(file)
        if start:  # the earlier part may be the damaged one
            raise ImageError(str(error), hint=error.hint, retryable=True) from error
        raise
    return moved


@asynccontextmanager
async def _alone(store: Store, blob: Blob) -> AsyncIterator[BinaryIO | None]:
    """Open the blob's partial file for one task only; None if the blob exists.

    The file's lock makes other tasks and processes wait, and ends with its owner. If the context
    ends without an error, the file becomes the blob; an empty file is removed.
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
    """Return whether the path still names this file: its former owner may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _hash_of(file: BinaryIO) -> hashlib._Hash:
    """Read a file to its end and return its hash."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest


def _write(file: BinaryIO, data: bytes) -> None:
    """Write all bytes: on an almost full disk one write may accept fewer."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _rewind(file: BinaryIO) -> tuple[int, hashlib._Hash]:
    file.truncate(0)
    file.seek(0)
    return 0, hashlib.sha256()
