"""Pull images from registries into the store, ready for sandboxes.

Per image, the manifest is read and reduced to this machine's platform. Each layer that the store
lacks is downloaded, verified and unpacked, several at once. The name is written last, so an image
is complete or absent. Shared layers are fetched once. The same command continues where it stopped,
because whole blobs are kept.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from swerl.core.errors import ImageError
from swerl.core.image_reference import Reference, is_local, parse
from swerl.core.jobs import run_jobs
from swerl.images.http import RegistryOptions, http_session
from swerl.images.manifest import Blob, Manifest, machine_platform, read_config
from swerl.images.mirror import rewritten
from swerl.images.registry import Registries, Registry
from swerl.images.store import Named, Store, StoredImage

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

    One attempt. A blob of another size or digest is discarded. Raises ImageError.
    """
    if store.has_blob(blob):
        return 0
    try:
        with store.owner().scratch() as folder:
            with (folder / "blob").open("wb") as file:
                async with aclosing(registry.blob(repository, blob)) as chunks:
                    async for chunk in chunks:
                        file.write(chunk)
                        on_bytes(len(chunk))
            store.adopt(folder / "blob", blob.digest)
    except OSError as error:
        full = error.errno in _FULL
        hint = (
            "free some, or run `swerl images gc --keep TASKS`" if full else "check its permissions"
        )
        raise ImageError(
            f"no space is left in {store.root}" if full else f"cannot write a blob: {error}",
            hint=hint,
        ) from error
    return blob.size
