"""Estimate the cost of fetching task images: layers, bytes, pulls.

Only manifests are read. They go into the store, and a later pull uses them: a registry that counts
pulls counts its manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from swerl.core.errors import ImageError
from swerl.core.image_reference import is_local
from swerl.core.jobs import run_jobs
from swerl.images.http import RegistryOptions, http_session
from swerl.images.manifest import Blob, Manifest, machine_platform
from swerl.images.mirror import rewritten
from swerl.images.registry import Registries
from swerl.images.store import Store


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """One image of a plan: its blobs, or the `error` that hides them."""

    image: str
    registry: str = ""
    digest: str = ""
    blobs: tuple[Blob, ...] = ()
    """Config and layers, compressed as they travel."""
    is_stored: bool = False
    """True if the store has it ready to run."""
    error: ImageError | None = None


@dataclass(frozen=True)
class ImagePlan:
    """The cost of a set of images."""

    images: tuple[PlannedImage, ...]
    missing: frozenset[Blob]
    """Blobs that the store lacks, each once."""
    num_local: int = 0
    """Images that come from no registry."""

    @cached_property
    def blobs(self) -> frozenset[Blob]:
        return frozenset(blob for image in self.images for blob in image.blobs)

    @property
    def unique_bytes(self) -> int:
        """Bytes of every blob once: the final size of a mirror or store."""
        return sum(blob.size for blob in self.blobs)

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be fetched."""
        return sum(blob.size for blob in self.missing)

    @property
    def failed(self) -> tuple[PlannedImage, ...]:
        """Images whose manifest could not be read."""
        return tuple(image for image in self.images if image.error)

    def num_pulls(self, registry: str) -> int:
        """Count the pulls from a registry: one per image that is not stored."""
        return sum(i.registry == registry and not i.is_stored and not i.error for i in self.images)


async def plan(
    images: Iterable[str],
    store: Store,
    *,
    options: RegistryOptions | None = None,
    on_done: Callable[[PlannedImage], None] = lambda _: None,
) -> ImagePlan:
    """Read the manifests of images and add them up; one that fails stops no other."""
    options = options or RegistryOptions(workers=8)  # manifests are small
    names = list(dict.fromkeys(images))
    remote = [name for name in names if not is_local(name)]
    async with http_session() as http:
        registries = Registries(http, options.docker_config, options.patience, store)

        async def one(name: str) -> PlannedImage:
            return await _image(name, store, registries, options)

        planned = tuple(await run_jobs(remote, one, limit=options.workers, on_done=on_done))
    missing = _missing(planned, store)
    return ImagePlan(planned, missing, len(names) - len(remote))


async def _image(
    name: str, store: Store, registries: Registries, options: RegistryOptions
) -> PlannedImage:
    try:
        source = rewritten(name, options.rewrites)
        if stored := _stored(name, store):
            blobs = tuple(stored.blobs())
            return PlannedImage(name, source.registry, stored.digest, blobs, is_stored=True)
        manifest = await registries.manifest(source, machine_platform())
        return PlannedImage(name, source.registry, manifest.digest, tuple(manifest.blobs()))
    except ImageError as error:
        return PlannedImage(name, error=error)


def _stored(name: str, store: Store) -> Manifest | None:
    """Return the manifest of an image that is ready to run, or None."""
    try:
        store.find(name)
        return store.manifest(store.named(name))
    except ImageError:
        return None


def _missing(images: Iterable[PlannedImage], store: Store) -> frozenset[Blob]:
    blobs = (blob for image in images if not image.is_stored for blob in image.blobs)
    return frozenset(blob for blob in blobs if not store.has_blob(blob))
