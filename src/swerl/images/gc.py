"""Free space in the store: remove the images that no Task to keep needs.

Layers that a kept image shares stay. So does everything that an open sandbox of any process uses,
or that a pull is downloading.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.image_reference import is_local, parse
from swerl.images.store import Named, Snapshot, Store

_UNUSED_S = 30 * 86_400.0
"""Age at which an unused snapshot is no part of its image any more."""


class _PartKind(StrEnum):
    BLOB = "blob"
    LAYER = "layer"


_Key = tuple[_PartKind, str]
"""A part of the store: its kind, and a blob's digest or a layer's id."""


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
    num_outside: int = 0
    """Removed snapshots of Docker daemons, which are not in the store, and of killed servers."""


def collect(store: Store, keep: Iterable[str], *, dry_run: bool = False) -> GcResult:
    """Remove the images that `keep` does not name, and all parts without an image.

    Raises InputError if a name in `keep` is malformed.
    """
    kept = _names_of(keep)
    if not store.root.is_dir():
        return GcResult((), (), 0, 0, 0)
    names = store.names()
    snapshots = store.snapshots(since_s=time.time() - _UNUSED_S)
    needs = {name.reference: _needs(store, name, snapshots) for name in names}
    if not dry_run:
        store.remove_leftovers()
    with store.owner().scratch() as bin, store.exclusive() as in_use:
        names = _with_newcomers(store, names, needs)
        plan = _GcPlan(store, needs, in_use)
        for name in names:
            if kept.isdisjoint((name.reference, name.digest)):
                plan.evict(name)
        gone = plan.gone
        if not dry_run:
            for name in plan.removed:
                store.unname(name.reference)
            for number, path in enumerate(gone):
                path.rename(bin / str(number))
    return GcResult(plan.removed, plan.in_use, plan.freed_bytes, plan.kept_bytes, len(gone))


class _GcPlan:
    """The parts to remove and to keep, image by image."""

    def __init__(self, store: Store, needs: dict[str, set[_Key]], in_use: set[str]) -> None:
        self._store = store
        self._needs = needs
        self._used = in_use
        self._users = Counter(key for keys in needs.values() for key in keys)
        self._sizes = {key: _size(store, key) for key in _present(store)}
        self.kept_bytes = sum(self._sizes.values())
        self.freed_bytes = 0
        self.removed: list[Named] = []
        self.in_use: list[Named] = []
        self.gone: list[Path] = []
        for key in list(self._sizes):
            self._drop(key)

    def evict(self, name: Named) -> None:
        """Remove an image, with the parts that no other image needs."""
        if name.digest in self._used:
            self.in_use.append(name)
            return
        self.removed.append(name)
        self._users.subtract(self._needs[name.reference])
        for key in sorted(self._needs[name.reference]):
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        if self._users[key] or key[1] in self._used or key not in self._sizes:
            return
        size = self._sizes.pop(key)
        self.freed_bytes += size
        self.kept_bytes -= size
        self.gone.append(_place(self._store, *key))


def _names_of(images: Iterable[str]) -> set[str]:
    """Return the full names and the digests of images, without those of this machine alone."""
    references = [parse(image) for image in images if not is_local(image)]
    return {str(reference) for reference in references} | {
        reference.digest for reference in references if reference.digest
    }


def _needs(store: Store, name: Named, snapshots: Mapping[str, Snapshot]) -> set[_Key]:
    """Return the parts of an image with its snapshots; an unreadable image has only a manifest."""
    keys = {(_PartKind.LAYER, key) for key, of in snapshots.items() if of.digest == name.digest}
    keys.add((_PartKind.BLOB, name.digest))
    with suppress(ImageError):
        manifest = store.manifest(name)
        keys |= {(_PartKind.BLOB, blob.digest) for blob in manifest.blobs()}
        keys |= {(_PartKind.LAYER, layer_id) for layer_id in store.config(manifest).diff_ids}
    return keys


def _present(store: Store) -> Iterator[_Key]:
    """Yield every part in the store, needed or not."""
    for folder, kind in (("blobs/sha256", _PartKind.BLOB), ("layers", _PartKind.LAYER)):
        for path in sorted((store.root / folder).glob("*")):
            yield kind, f"sha256:{path.name}"


def _place(store: Store, kind: _PartKind, digest: str) -> Path:
    return store.blob(digest) if kind is _PartKind.BLOB else store.layer(digest)


def _with_newcomers(store: Store, names: list[Named], needs: dict[str, set[_Key]]) -> list[Named]:
    """Add images that arrived during the scan to `needs`; return the names that may be removed."""
    current = set(store.names())
    for name in current.difference(names):
        needs[name.reference] = _needs(store, name, store.snapshots())
    return [name for name in names if name in current]


def _size(store: Store, key: _Key) -> int:
    kind, digest = key
    try:
        if kind is _PartKind.LAYER:
            return store.layer_record(digest).num_bytes
        return store.blob(digest).stat().st_size
    except (OSError, ValueError, TypeError, KeyError):
        return 0
