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
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from swerl.core.errors import ImageError
from swerl.core.image_reference import is_local, parse
from swerl.core.jobs import run_jobs
from swerl.images.http import Patience, RegistryOptions, http_session, patiently
from swerl.images.manifest import Blob, Manifest, machine_platform, read_config
from swerl.images.mirror import rewritten
from swerl.images.registry import Registries
from swerl.images.store import Named, Store, StoredImage

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ReadBlob = Callable[[Blob], AsyncGenerator[bytes]]


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


@dataclass(slots=True)
class PullPlan:
    """The cost of pulling a set of images, before any layer is fetched."""

    num_images: int
    """Images of registries."""
    num_local: int
    """Images that come from no registry."""
    num_stored: int = 0
    """Images that the store has ready to run."""
    blobs: set[Blob] = field(default_factory=set)
    """Configs and layers of all images, compressed as they travel."""
    missing: set[Blob] = field(default_factory=set)
    """Blobs that the store lacks."""
    pulls: Counter[str] = field(default_factory=Counter)
    """Registry -> pulls that it counts: one per image that is not stored."""
    failed: dict[str, ImageError] = field(default_factory=dict)
    """Image whose manifest could not be read -> its error."""


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
        registries = Registries(http, options, store)
        run = _PullRun(store, options, on_bytes)

        async def one(image: str) -> Pulled:
            if not options.refresh:
                with suppress(ImageError):
                    return Pulled(image, store.find(image))
            try:
                source = rewritten(image, options.rewrites)
                manifest = await registries.manifest(source, machine_platform())
                read = partial(registries.at(source.registry).blob, source.repository)
                origin = str(source.pinned(manifest.digest))
                moved = await run.image(str(parse(image)), manifest, read, origin)
                return Pulled(image, store.find(image), moved_bytes=moved)
            except ImageError as error:
                return Pulled(image, error=error)

        return await run_jobs(names, one, limit=options.workers, on_done=on_done)


async def pull_one(image: str, store: Store, *, options: PullOptions | None = None) -> StoredImage:
    """Pull one image and return it. Raises ImageError."""
    (pulled,) = await pull([image], store, options=options)
    if pulled.error:
        raise pulled.error
    return store.find(image)


async def plan(
    images: Iterable[str],
    store: Store,
    *,
    options: PullOptions,
    on_done: Callable[[None], None] = lambda _: None,
) -> PullPlan:
    """Read the manifests of images and add up what a pull would fetch.

    The manifests go into the store, and a later pull uses them: a registry that counts pulls counts
    its manifests.
    """
    names = list(dict.fromkeys(images))
    remote = [name for name in names if not is_local(name)]
    plan = PullPlan(len(remote), len(names) - len(remote))
    async with http_session() as http:
        registries = Registries(http, options, store)

        async def add(name: str) -> None:
            try:
                source = rewritten(name, options.rewrites)
                try:
                    store.find(name)
                    manifest = store.manifest(store.named(name))
                    plan.num_stored += 1
                except ImageError:
                    manifest = await registries.manifest(source, machine_platform())
                    plan.pulls[source.registry] += 1
                plan.blobs.update(manifest.blobs())
            except ImageError as error:
                plan.failed[name] = error

        await run_jobs(remote, add, limit=2 * options.workers, on_done=on_done)
    plan.missing = {blob for blob in plan.blobs if not store.has_blob(blob)}
    return plan


async def store_image(name: str, manifest: Manifest, read: _ReadBlob, store: Store) -> None:
    """Store the image of a manifest, unpacked; `read` yields a blob. Raises ImageError."""
    run = _PullRun(store, PullOptions(patience=Patience(tries=1)), lambda _: None)
    await run.image(name, manifest, read)


class _PullRun:
    """One pull: its store, and the layers under way."""

    def __init__(self, store: Store, options: PullOptions, on_bytes: Callable[[int], None]) -> None:
        self._store = store
        self._options = options
        self._on_bytes = on_bytes
        self._layers: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(options.workers)

    async def image(self, name: str, manifest: Manifest, read: _ReadBlob, origin: str = "") -> int:
        """Fetch and unpack what the store lacks; return the bytes moved. Raises ImageError."""
        try:
            return await self._image(name, manifest, read, origin)
        except OSError as error:
            message, hint = f"cannot write the store: {error}", "check its permissions"
            if error.errno in _FULL:
                message = f"no space is left in {self._store.root}"
                hint = "free some, or run `swerl images gc --keep TASKS`"
            raise ImageError(message, hint=hint) from error

    async def _image(self, name: str, manifest: Manifest, read: _ReadBlob, origin: str) -> int:
        parts = [manifest.digest, *(blob.digest for blob in manifest.blobs())]
        with self._store.using(parts):
            moved = await self._blob(manifest.config(), read)
            config = read_config(self._store.read(manifest.config().digest, name), manifest)
            config.require_platform(machine_platform(), name)
            layers = dict(zip(config.diff_ids, manifest.layers(), strict=True))
            with self._store.using(layers):

                async def one(layer: tuple[str, Blob]) -> int:
                    return await self._layer(*layer, read)

                moved += sum(await run_jobs(layers.items(), one, limit=self._options.workers))
                digest = self._store.put(manifest.body)
                self._store.name(Named(name, digest, origin, time.time()))
        return moved

    async def _layer(self, diff_id: str, blob: Blob, read: _ReadBlob) -> int:
        async with self._layers[diff_id], self._slots:
            if self._store.has_layer(diff_id):
                return 0
            moved = await self._blob(blob, read)
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

    async def _blob(self, blob: Blob, read: _ReadBlob) -> int:
        """Fetch a blob unless it exists; return the bytes moved."""
        if self._store.has_blob(blob):
            return 0
        await patiently(lambda: self._download(blob, read), self._options.patience)
        return blob.size

    async def _download(self, blob: Blob, read: _ReadBlob) -> None:
        """Try once to fetch a blob; one of another size or digest is discarded."""
        with self._store.scratch() as folder:
            with (folder / "blob").open("wb") as file:
                async with aclosing(read(blob)) as pieces:
                    async for piece in pieces:
                        file.write(piece)
                        self._on_bytes(len(piece))
            self._store.adopt(folder / "blob", blob.digest)
