"""Free space in the store: remove the images that no Task to keep needs.

Layers that a kept image shares stay. So does everything that an open sandbox of any process uses,
or that a pull is downloading.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.image_reference import is_local, parse
from swerl.images.store import Named, Snapshot, Store

_UNUSED_S = 30 * 86_400.0
"""Age at which an unused snapshot is no part of its image any more."""


@dataclass(frozen=True, slots=True)
class GcResult:
    """The parts that were removed, or would be."""

    removed: Sequence[Named]
    """Removed images, the oldest first."""
    in_use: Sequence[Named]
    """Images that were kept because an open sandbox uses them."""
    freed_bytes: int
    kept_bytes: int
    num_parts: int
    """Removed blobs and layers."""


def collect(store: Store, keep: Iterable[str], *, dry_run: bool = False) -> GcResult:
    """Remove the images that `keep` does not name, and all parts without an image.

    Raises InputError if a name in `keep` is malformed.
    """
    references = [parse(image) for image in keep if not is_local(image)]
    keep_names = {name for each in references for name in (str(each), each.digest) if name}
    if not store.root.is_dir():
        return GcResult((), (), 0, 0, 0)
    if not dry_run:
        store.remove_leftovers()
    # Other processes wait meanwhile.
    with store.scratch() as bin, store.exclusive() as used:
        snapshots = store.snapshots(since_s=time.time() - _UNUSED_S)
        needed, removed, in_use = set(used), [], []
        for name in store.names():
            is_kept = not keep_names.isdisjoint((name.reference, name.digest))
            if not is_kept and name.digest not in used:
                removed.append(name)
                continue
            needed |= _parts(store, name, snapshots)
            if not is_kept:
                in_use.append(name)
        sizes = dict(_present(store))
        gone = [path for path in sizes if f"sha256:{path.name}" not in needed]
        if not dry_run:
            for name in removed:
                store.unname(name.reference)
            for number, path in enumerate(gone):
                path.rename(bin / str(number))
    freed_bytes = sum(sizes[path] for path in gone)
    return GcResult(removed, in_use, freed_bytes, sum(sizes.values()) - freed_bytes, len(gone))


def _parts(store: Store, name: Named, snapshots: Mapping[str, Snapshot]) -> set[str]:
    """Return the digests of an image's blobs and layers, and the ids of its snapshots."""
    parts = {layer_id for layer_id, of in snapshots.items() if of.digest == name.digest}
    parts.add(name.digest)
    with suppress(ImageError):  # unreadable: a pull repairs it
        manifest = store.manifest(name)
        parts |= {blob.digest for blob in manifest.blobs()}
        parts |= set(store.config(manifest).diff_ids)
    return parts


def _present(store: Store) -> Iterator[tuple[Path, int]]:
    """Yield the path and the size of every blob and layer, needed or not."""
    for path in sorted((store.root / "blobs" / "sha256").glob("*")):
        yield path, path.stat().st_size
    for path in sorted((store.root / "layers").glob("*")):
        num_bytes = 0
        with suppress(OSError, ValueError, TypeError, KeyError):  # its record is damaged
            num_bytes = store.layer_bytes(f"sha256:{path.name}")
        yield path, num_bytes
