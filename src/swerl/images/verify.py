"""Check the store's content, byte for byte, and fetch damaged parts again."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.jobs import run_jobs
from swerl.images.manifest import sha256
from swerl.images.mirror import rewritten
from swerl.images.pull import Pulled, PullOptions, pull
from swerl.images.store import Named, Store, differences

UNUSED_S = 30 * 86_400.0
"""Age at which an unused snapshot is no part of its image any more."""
_MAX_NAMED = 3
"""Most changed files named in a message."""


class PartKind(StrEnum):
    BLOB = "blob"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class StorePart:
    """A blob or an unpacked layer, and the images that need it."""

    kind: PartKind
    digest: str
    """Digest of a blob, or the store's id of a layer."""
    images: tuple[str, ...] = ()
    size: int | None = None
    """A blob's size in its manifest."""


@dataclass(frozen=True, slots=True)
class CheckedPart:
    part: StorePart
    problem: str = ""
    """The damage; empty if the part is intact."""
    num_bytes: int = 0
    """Bytes that were read."""


@dataclass(frozen=True, slots=True)
class RepairResult:
    pulled: Sequence[Pulled] = ()
    in_use: Sequence[StorePart] = ()
    """Layers of open sandboxes, which were not touched."""
    lost: Sequence[str] = ()
    """Images without a registry, which must be imported again."""


async def verify(
    store: Store,
    names: Sequence[Named],
    *,
    everything: bool = False,
    workers: int = 4,
    on_done: Callable[[CheckedPart], None] = lambda _: None,
) -> list[CheckedPart]:
    """Check every part of these images; with `everything` also the parts that no image needs.

    A blob is compared with its digest and size, and an unpacked layer with the listing made when it
    was written.
    """
    parts = await asyncio.to_thread(parts_of, store, names, everything=everything)

    async def check(part: StorePart) -> CheckedPart:
        return await asyncio.to_thread(_check, store, part)

    return await run_jobs(parts, check, limit=workers, on_done=on_done)


async def repair(
    store: Store, damaged: Iterable[CheckedPart], options: PullOptions
) -> RepairResult:
    """Remove damaged parts, then pull the images that need them again, by digest."""

    async def again(named: tuple[str, str]) -> Pulled:
        (done,) = await pull([named[0]], store, options=_at(options, *named))
        return done

    by_name = {named.reference: named for named in store.names()}
    damaged = list(damaged)
    in_use = await asyncio.to_thread(_discard, store, [checked.part for checked in damaged])
    wanted = sorted({image for checked in damaged for image in checked.part.images})
    sources = {image: by_name[image].source for image in wanted if image in by_name}
    lost = [image for image, source in sources.items() if not source]
    pulls = [named for named in sources.items() if named[1]]
    return RepairResult(await run_jobs(pulls, again, limit=options.workers), in_use, lost)


def parts_of(store: Store, names: Sequence[Named], *, everything: bool = False) -> list[StorePart]:
    """Return the parts of images, each once; an image with a damaged manifest has no others."""
    images: defaultdict[tuple[PartKind, str], list[str]] = defaultdict(list)
    sizes: dict[str, int] = {}
    snapshots = store.snapshots(since_s=time.time() - UNUSED_S)
    for named in names:
        found = [*_parts(store, named)]
        # A snapshot needs its image, and goes with it, or when it has been unused for long.
        found += [
            (PartKind.LAYER, key, None)
            for key, snapshot in snapshots.items()
            if snapshot.digest == named.digest
        ]
        for kind, digest, size in found:
            images[kind, digest].append(named.reference)
            if size is not None:
                sizes[digest] = size
    for key in present(store) if everything else ():
        images.setdefault(key, [])
    return [
        StorePart(kind, digest, tuple(users), sizes.get(digest))
        for (kind, digest), users in images.items()
    ]


def present(store: Store) -> Iterator[tuple[PartKind, str]]:
    """Yield every part in the store, needed or not."""
    for folder, kind in (("blobs/sha256", PartKind.BLOB), ("layers", PartKind.LAYER)):
        for path in sorted((store.root / folder).glob("*")):
            yield kind, f"sha256:{path.name}"


def place(store: Store, kind: PartKind, digest: str) -> Path:
    return store.blob(digest) if kind is PartKind.BLOB else store.layer(digest)


def _parts(store: Store, named: Named) -> Iterator[tuple[PartKind, str, int | None]]:
    yield PartKind.BLOB, named.digest, None
    try:
        manifest = store.manifest(named)
        yield PartKind.BLOB, manifest.config().digest, manifest.config().size
        config = store.config(manifest)
    except ImageError:
        return
    for blob in manifest.layers():
        if store.blob(blob.digest).exists():  # an unpacked layer does not need it
            yield PartKind.BLOB, blob.digest, blob.size
    for layer_id in store.layer_ids(config.diff_ids):
        yield PartKind.LAYER, layer_id, None


def _check(store: Store, part: StorePart) -> CheckedPart:
    try:
        check = _check_blob if part.kind is PartKind.BLOB else _check_layer
        return check(store, part)
    except FileNotFoundError:
        return CheckedPart(part, "is missing")
    except (OSError, ValueError, TypeError) as error:
        return CheckedPart(part, f"cannot be read: {error}")


def _check_blob(store: Store, part: StorePart) -> CheckedPart:
    path = store.blob(part.digest)
    size = path.stat().st_size
    if part.size not in {None, size}:
        return CheckedPart(part, f"has {size} bytes instead of {part.size}")
    with path.open("rb") as file:
        found = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    problem = "" if found == part.digest else f"has a different digest: {found}"
    return CheckedPart(part, problem, size)


def _check_layer(store: Store, part: StorePart) -> CheckedPart:
    note = store.layer_record(part.digest)
    listing = (store.layer(part.digest) / "listing").read_text()
    if sha256(listing.encode()) != note.listing:
        return CheckedPart(part, "has a changed listing")
    changed = differences(listing, store.layer_tree(part.digest))
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    named = ", ".join(changed[:_MAX_NAMED])
    return CheckedPart(part, f"has changed files: {named}{more}" if changed else "", note.num_bytes)


def _at(options: PullOptions, image: str, source: str) -> PullOptions:
    """Return options that pull one whole image from its former source."""
    source = rewritten(source, options.rewrites)
    return replace(options, rewrites={image: source}, refresh=True, whole=True)


def _discard(store: Store, parts: Sequence[StorePart]) -> list[StorePart]:
    """Remove parts that no sandbox uses; return the others."""
    in_use = []
    with store.owner().scratch() as bin, store.exclusive() as used:
        for number, part in enumerate(parts):
            path = place(store, part.kind, part.digest)
            if part.digest in used:
                in_use.append(part)
            elif path.exists():
                path.rename(bin / str(number))
    return in_use
