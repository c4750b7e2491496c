"""Checks what the store holds, byte for byte, and fetches what is damaged again."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.images.manifest import sha256
from swerl.images.mirror import rewritten
from swerl.images.pull import Pulled, PullOptions, pull
from swerl.images.store import Named, Store, differences

_MAX_NAMED = 3
"""Changed files that a message names."""


class Kind(StrEnum):
    """What a part of the store is."""

    BLOB = "blob"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Part:
    """A blob or an unpacked layer, and the images that need it."""

    kind: Kind
    digest: str
    """Digest of a blob, id of a layer in the store."""
    images: tuple[str, ...] = ()
    size: int | None = None
    """Bytes that a manifest says a blob has."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome for one part."""

    part: Part
    problem: str = ""
    """What is wrong with it; empty where nothing is."""
    num_bytes: int = 0
    """Bytes that were read."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What became of the damaged parts."""

    pulled: Sequence[Pulled] = ()
    in_use: Sequence[Part] = ()
    """Layers of open sandboxes, which were left alone."""
    lost: Sequence[str] = ()
    """Images that came from no registry and must be imported again."""


async def verify(
    store: Store,
    names: Sequence[Named],
    *,
    everything: bool = False,
    workers: int = 4,
    on_done: Callable[[Checked], None] = lambda _: None,
) -> list[Checked]:
    """Check every part of these images, and with `everything` what no image needs too.

    A blob is read and compared with its digest and size, an unpacked layer file by file with the
    listing that was made as it was written.
    """
    slots = asyncio.Semaphore(workers)

    async def one(part: Part) -> Checked:
        async with slots:
            checked = await asyncio.to_thread(_check, store, part)
        on_done(checked)
        return checked

    parts = await asyncio.to_thread(parts_of, store, names, everything=everything)
    return list(await asyncio.gather(*map(one, parts)))


async def repair(store: Store, damaged: Iterable[Checked], options: PullOptions) -> Repair:
    """Remove damaged parts, then pull the images that need them again, by digest."""
    slots = asyncio.Semaphore(options.workers)

    async def again(image: str, source: str) -> Pulled:
        async with slots:
            (done,) = await pull([image], store, options=_at(options, image, source))
        return done

    by_name = {named.reference: named for named in store.names()}
    damaged = list(damaged)
    in_use = await asyncio.to_thread(_discard, store, [checked.part for checked in damaged])
    wanted = sorted({image for checked in damaged for image in checked.part.images})
    sources = {image: by_name[image].source for image in wanted if image in by_name}
    lost = [image for image, source in sources.items() if not source]
    pulls = [again(image, source) for image, source in sources.items() if source]
    return Repair(await asyncio.gather(*pulls), in_use, lost)


def parts_of(store: Store, names: Sequence[Named], *, everything: bool = False) -> list[Part]:
    """Return the parts of images, each once; one whose manifest is damaged has no others."""
    images: defaultdict[tuple[Kind, str], list[str]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for named in names:
        for kind, digest, size in _parts(store, named):
            images[kind, digest].append(named.reference)
            if size is not None:
                sizes[digest] = size
    for key in present(store) if everything else ():
        images.setdefault(key, [])
    return [
        Part(kind, digest, tuple(users), sizes.get(digest))
        for (kind, digest), users in images.items()
    ]


def present(store: Store) -> Iterator[tuple[Kind, str]]:
    """Yield every part that lies in the store, needed or not."""
    for folder, kind in (("blobs/sha256", Kind.BLOB), ("layers", Kind.LAYER)):
        for path in sorted((store.root / folder).glob("*")):
            yield kind, f"sha256:{path.name}"


def place(store: Store, kind: Kind, digest: str) -> Path:
    """Return where a part is, present or not."""
    return store.blob(digest) if kind is Kind.BLOB else store.layer(digest)


def _parts(store: Store, named: Named) -> Iterator[tuple[Kind, str, int | None]]:
    yield Kind.BLOB, named.digest, None
    try:
        manifest = store.manifest(named)
        yield Kind.BLOB, manifest.config().digest, manifest.config().size
        config = store.config(manifest)
    except ImageError:
        return
    for blob in manifest.layers():
        if store.blob(blob.digest).exists():  # an unpacked layer does without
            yield Kind.BLOB, blob.digest, blob.size
    for layer_id in store.layer_ids(config.diff_ids):
        yield Kind.LAYER, layer_id, None


def _check(store: Store, part: Part) -> Checked:
    try:
        check = _check_blob if part.kind is Kind.BLOB else _check_layer
        return check(store, part)
    except FileNotFoundError:
        return Checked(part, "is missing")
    except (OSError, ValueError, TypeError) as error:
        return Checked(part, f"cannot be read: {error}")


def _check_blob(store: Store, part: Part) -> Checked:
    path = store.blob(part.digest)
    size = path.stat().st_size
    if part.size not in {None, size}:
        return Checked(part, f"has {size} bytes instead of {part.size}")
    with path.open("rb") as file:
        found = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    problem = "" if found == part.digest else f"has other content: {found}"
    return Checked(part, problem, size)


def _check_layer(store: Store, part: Part) -> Checked:
    note = store.note(part.digest)
    listing = (store.layer(part.digest) / "listing").read_text()
    if sha256(listing.encode()) != note.listing:
        return Checked(part, "has another listing than was made for it")
    changed = differences(listing, store.layer_tree(part.digest))
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    named = ", ".join(changed[:_MAX_NAMED])
    return Checked(part, f"has changed files: {named}{more}" if changed else "", note.num_bytes)


def _at(options: PullOptions, image: str, source: str) -> PullOptions:
    """Return options that pull one image whole from where it was pulled before."""
    source = rewritten(source, options.rewrites)
    return replace(options, rewrites={image: source}, refresh=True, whole=True)


def _discard(store: Store, parts: Sequence[Part]) -> list[Part]:
    """Remove parts that no sandbox uses; return the others."""
    in_use = []
    with store.owner().scratch() as bin, store.alone() as used:
        for number, part in enumerate(parts):
            path = place(store, part.kind, part.digest)
            if part.digest in used:
                in_use.append(part)
            elif path.exists():
                path.rename(bin / str(number))
    return in_use
