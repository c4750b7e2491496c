"""Copy task images from registry to registry by digest, so that training pulls from one place.

Per image, the manifest is read and reduced to linux/amd64. Each blob that the target lacks is
mounted from another repository of the target, or streamed across and verified. The manifest is
stored last, so an image is complete or absent. A lock file records the results: the same command
continues where it stopped, and a moved tag changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import aiohttp

from swerl.core.errors import ImageError, InputError
from swerl.core.image_reference import Reference, Target, is_local, parse
from swerl.core.jobs import run_jobs
from swerl.core.task import Task
from swerl.images.http import RegistryOptions, http_session
from swerl.images.manifest import PLATFORM, Blob
from swerl.images.registry import Registries

_SAVE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The result for one image: `pinned`, or the `error` that stopped it."""

    image: str
    pinned: Pinned | None = None
    error: ImageError | None = None
    was_there: bool = False
    """True if the target had the whole image."""
    moved_bytes: int = 0
    """Bytes sent to the target."""


async def mirror(
    images: Iterable[str],
    target: Target,
    lock_file: Path,
    *,
    options: RegistryOptions | None = None,
    on_done: Callable[[Mirrored], None] = lambda _: None,
) -> list[Mirrored]:
    """Mirror images to `target`; an image that fails is reported and stops no other.

    Raises ImageError if the target itself cannot be used, and InputError if two images would get
    one name.
    """
    options = options or RegistryOptions()
    remote = [name for name in images if not is_local(name)]
    sources = {name: rewritten(name, options.rewrites) for name in remote}
    _refuse_clashes(sources, target)
    lock = LockFile(lock_file)
    lock.save()  # fail before hours of transfer if it cannot be written
    async with http_session() as http:
        run = _MirrorRun(http, target, lock, options)
        await run.registries.at(target.registry).ping()  # a wrong address fails at once
        try:
            return await run_jobs(
                sources.items(), run.image, limit=options.workers, on_done=on_done
            )
        finally:
            lock.save()


class _MirrorRun:
    """One mirror run: its registries, target and lock file."""

    def __init__(
        self, http: aiohttp.ClientSession, target: Target, lock: LockFile, options: RegistryOptions
    ) -> None:
        self.registries = Registries(http, options)
        self._target = target
        self._lock = lock

    async def image(self, item: tuple[str, Reference]) -> Mirrored:
        """Mirror an image, given its name and its source."""
        image, source = item
        try:
            place = self._target.place(source)
            locked = self._lock.images.get(image)
            if locked and locked.reference == str(place.pinned(locked.digest)):
                if await self._has(place.pinned(locked.digest)):
                    return Mirrored(image, locked, was_there=True)
                source = source.pinned(locked.digest)
            mirrored = await self._copy(image, source, place)
        except ImageError as error:
            return Mirrored(image, error=error)
        if mirrored.pinned:
            self._lock.put(image, mirrored.pinned)
        return mirrored

    async def _has(self, place: Reference) -> bool:
        registry = self.registries.at(place.registry)
        return await self.registries.patiently(
            lambda: registry.has_manifest(place.repository, place.digest)
        )

    async def _copy(self, image: str, source: Reference, place: Reference) -> Mirrored:
        manifest = await self.registries.manifest(source, PLATFORM)
        blobs = manifest.blobs()
        moved_bytes = await self._move(source, place, blobs)
        registry = self.registries.at(place.registry)
        await self.registries.patiently(
            lambda: registry.put_manifest(place.repository, place.tag, manifest)
        )
        reference = str(place.pinned(manifest.digest))
        size = sum(blob.size for blob in blobs)
        pinned = Pinned(str(source), manifest.digest, reference, size)
        return Mirrored(image, pinned, moved_bytes=moved_bytes)

    async def _move(self, source: Reference, place: Reference, blobs: Sequence[Blob]) -> int:
        """Copy blobs and return the bytes streamed.

        If one fails, the others finish first and are ready for the next run: an upload that is
        cancelled within a request may stay behind at the registry.
        """
        origin = self.registries.at(source.registry)
        home = source.repository if source.registry == place.registry else ""

        async def one(blob: Blob) -> int:
            read = partial(origin.blob, source.repository, blob)
            is_moved = await self.registries.push_blob(place, blob, read, home=home)
            return blob.size if is_moved else 0

        results = await asyncio.gather(*map(one, blobs), return_exceptions=True)
        moved_bytes = 0
        for result in results:
            if isinstance(result, BaseException):
                raise result
            moved_bytes += result
        return moved_bytes


def _refuse_clashes(sources: Mapping[str, Reference], target: Target) -> None:
    sources_by_place: dict[tuple[Reference, str], Reference] = {}
    for source in sources.values():
        key = (target.place(source), source.digest)
        other = sources_by_place.setdefault(key, source)
        if other.registry != source.registry:
            raise InputError(
                f"{other} and {source} would both become {key[0]}",
                hint="mirror the tasks in two files, to two prefixes",
            )


def rewrite(tasks: Iterable[Task], lock_file: Path) -> list[Task]:
    """Return the Tasks with mirrored images, by digest. Raises ImageError if one is not
    mirrored."""
    pinned = LockFile(lock_file).images
    rewritten = []
    for task in tasks:
        if is_local(task.image):
            rewritten.append(task)
        elif task.image in pinned:
            rewritten.append(replace(task, image=pinned[task.image].reference))
        else:
            raise ImageError(
                f"image {task.image} of task {task.id} is not in {lock_file}",
                hint="mirror it first: run the same command again",
            )
    return rewritten


def rewritten(image: str, rewrites: Mapping[str, str]) -> Reference:
    """Return the name to read in place of `image`; `rewrites` are old start -> new start.

    A new start with `http://` names a mirror without encryption; the names of Tasks cannot.
    """
    full = str(parse(image))
    for name in (image, full):
        for old, new in rewrites.items():
            if name.startswith(old):
                source = parse(new.removeprefix("http://") + name.removeprefix(old))
                is_plain = new.startswith("http://")
                return replace(source, registry=f"http://{source.registry}") if is_plain else source
    return parse(image)


@dataclass(frozen=True, slots=True)
class Pinned:
    source: str
    """Source name, by tag or digest."""
    digest: str
    """Digest of its linux/amd64 manifest, the same on both sides."""
    reference: str
    """Name to pull it by from the mirror."""
    size_bytes: int
    """Compressed size of its blobs, shared ones included."""


class LockFile:
    """Task image -> Pinned, in a JSON file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        """Read the file if it exists. Raises InputError if it is not a lock file."""
        self.path = path
        self._saved_s = float("-inf")
        self.images: dict[str, Pinned] = _read(path)

    def put(self, image: str, pinned: Pinned) -> None:
        """Add an image. The file is written within a second, or by `save`."""
        self.images[image] = pinned
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file under a temporary name, then rename. Raises ImageError."""
        rows = {image: asdict(pinned) for image, pinned in sorted(self.images.items())}
        temporary = self.path.with_name(self.path.name + ".part")
        try:
            temporary.write_text(json.dumps({"images": rows}, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise ImageError(
                f"cannot write lock file {self.path}: {error.strerror}",
                hint="free some space there",
            ) from error
        self._saved_s = time.monotonic()


def _read(path: Path) -> dict[str, Pinned]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["images"]
        return {image: Pinned(**row) for image, row in rows.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a lock file of images: {error}",
            hint="move it away, or delete it",
        ) from error
