"""Pulls images from registries into the store, ready for sandboxes.

Per image: the manifest is read and reduced to this machine's platform; each layer that the store
lacks is downloaded, verified and unpacked, several at once; the name is written last, so that an
image is there whole or not at all. Layers that images share come once. The same command goes on
where it stopped: whole blobs are kept, and half ones are resumed where the registry can.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.image_reference import Reference, is_local, parse
from swerl.images._download import download
from swerl.images._http import Patience, http_session
from swerl.images._login import default_config
from swerl.images._registries import Registries
from swerl.images.mirror import rewritten
from swerl.images.oci.manifest import Blob, Manifest, chain_ids, machine_platform, read_config
from swerl.images.oci.records import Named, StoredImage
from swerl.images.oci.store import Store
from swerl.images.oci.unpack import LinksBelowError


@dataclass(frozen=True, slots=True)
class PullOptions:
    """How to pull."""

    workers: int = 4
    """Layers at once: enough to fill a gigabit line, few enough for a registry's limits."""
    rewrites: Mapping[str, str] = field(default_factory=dict)
    """Beginning of an image name -> what to read instead, such as a mirror near by."""
    refresh: bool = False
    """Whether to ask the registry again for names that are in the store: tags move."""
    whole: bool = False
    """Whether to fetch layer files even where the unpacked layer is there."""
    docker_config: Path = field(default_factory=default_config)
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The end of one image: `stored`, or the `error` that stopped it."""

    image: str
    stored: StoredImage | None = None
    error: ImageError | None = None
    moved_bytes: int = 0
    """Bytes that came from the registry for it."""


async def pull(
    images: Iterable[str],
    store: Store,
    *,
    options: PullOptions | None = None,
    on_done: Callable[[Pulled], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Pulled]:
    """Pull images; one that fails is reported and stops no other.

    `on_bytes` hears how many bytes arrived. Raises InputError on what is no image name.
    """
    options = options or PullOptions()
    names = [name for name in dict.fromkeys(images) if not is_local(name)]
    for name in names:
        parse(name)
    await asyncio.to_thread(store.sweep)
    async with http_session() as http:
        registries = Registries(http, options.docker_config, options.patience, store)
        run = _Run(store, registries, options, on_bytes)

        async def one(name: str) -> Pulled:
            done = await run.image(name)
            on_done(done)
            return done

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name)) for name in names]
    return [task.result() for task in tasks]


async def pull_one(image: str, store: Store, *, options: PullOptions | None = None) -> StoredImage:
    """Pull one image and return it. Raises ImageError."""
    (done,) = await pull([image], store, options=options)
    if done.error:
        raise done.error
    return store.find(image)


class _Run:
    """What one pull knows: its store, its registries, and who works on which layer."""

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
        self._images = asyncio.Semaphore(options.workers)

    async def image(self, image: str) -> Pulled:
        async with self._images:
            if not self._options.refresh:
                with suppress(ImageError):
                    return Pulled(image, self._store.find(image))
            try:
                moved = await self._image(image)
                return Pulled(image, self._store.find(image), moved_bytes=moved)
            except ImageError as error:
                return Pulled(image, error=error)
            except OSError as error:
                message = f"the store {self._store.root} cannot be written: {error.strerror}"
                return Pulled(image, error=ImageError(message, hint="check its rights and space"))

    async def _image(self, image: str) -> int:
        source = parse(rewritten(image, self._options.rewrites))
        manifest = await self._registries.manifest(source, machine_platform())
        parts = [manifest.digest, *(blob.digest for blob in manifest.blobs())]
        with self._store.owner().using(parts):
            moved = await self._blob(source, manifest.config())
            config = read_config(self._store.read(manifest.config().digest, image), manifest)
            with self._store.owner().using([*config.diff_ids, *chain_ids(config.diff_ids)]):
                moved += await self._all(source, manifest, config.diff_ids)
                digest = self._store.put(manifest.body)
                origin = str(source.pinned(digest))
                self._store.name(Named(str(parse(image)), digest, origin, time.time()))
        return moved

    async def _all(self, source: Reference, manifest: Manifest, diff_ids: tuple[str, ...]) -> int:
        ids = self._store.layer_ids(diff_ids)
        layers = dict(zip(diff_ids, zip(manifest.layers(), ids, strict=True), strict=True))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._layer(source, diff_id, blob, layer_id))
                    for diff_id, (blob, layer_id) in layers.items()
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await self._link(manifest, diff_ids)
        return sum(task.result() for task in tasks)

    async def _layer(self, source: Reference, diff_id: str, blob: Blob, layer_id: str) -> int:
        async with self._layers[diff_id], self._slots:
            needs_blob = self._options.whole and not self._store.has_blob(blob)
            if self._store.has_layer(layer_id) and not needs_blob:
                return 0
            moved = await self._blob(source, blob)
            with suppress(LinksBelowError):  # `_link` does those, once all others are there
                await self._unpack(blob, diff_id)
            return moved

    async def _link(self, manifest: Manifest, diff_ids: Sequence[str]) -> None:
        """Unpack the layers that link to files of the layers below them, lowest first."""
        for number, blob in enumerate(manifest.layers()):
            *below, diff_id = diff_ids[: number + 1]
            if not self._store.has_layer(self._store.layer_ids([*below, diff_id])[-1]):
                async with self._layers[diff_id], self._slots:
                    await self._unpack(blob, diff_id, below)

    async def _unpack(self, blob: Blob, diff_id: str, below: Sequence[str] = ()) -> None:
        stop = threading.Event()
        add = self._store.add_layer
        try:
            await asyncio.to_thread(add, blob.digest, diff_id, below=below, stop=stop)
        except asyncio.CancelledError:
            stop.set()  # the thread itself cannot be cancelled
            raise
        except LinksBelowError:
            raise
        except ImageError:
            self._store.blob(blob.digest).unlink(missing_ok=True)
            raise

    async def _blob(self, source: Reference, blob: Blob) -> int:
        registry = self._registries.at(source.registry)
        return await self._registries.patiently(
            lambda: download(registry, source.repository, blob, self._store, self._on_bytes)
        )
