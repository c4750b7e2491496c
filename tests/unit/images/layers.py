"""Layers and images made by hand, and what the tests of pulls and mirrors share."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerl.core.errors import ImageError
from swerl.images.manifest import IMAGE_TYPES, sha256
from swerl.images.mirror import Mirrored
from swerl.images.pull import Pulled
from swerl.images.store import Named, Store


@dataclass(frozen=True)
class Entry:
    """One tar entry: a file of `data` unless `kind` says otherwise."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    mtime: int = 1_000_000_000
    pax: Sequence[tuple[str, str]] = ()


def folder(name: str, mode: int = 0o755) -> Entry:
    return Entry(name, kind=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.LNKTYPE, link=target)


def make_tar(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.linkname, info.mode = entry.kind, entry.link, entry.mode
            info.mtime, info.size = entry.mtime, len(entry.data)
            info.pax_headers = dict(entry.pax)
            tar.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


def add_image(
    store: Store, name: str, *layers: Sequence[Entry], config: dict[str, Any] | None = None
) -> str:
    """Put an image of these layers into a store, unpacked, and return its manifest's digest."""
    tars = [make_tar(*layer) for layer in layers]
    blobs = [gzip.compress(tar, mtime=0) for tar in tars]
    diff_ids = [sha256(tar) for tar in tars]
    for number, blob in enumerate(blobs):
        store.put(blob)
        store.add_layer(sha256(blob), diff_ids[number])
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    body = json.dumps({"config": config or {}, "rootfs": rootfs}).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": IMAGE_TYPES[0],
        "config": {"digest": store.put(body), "size": len(body)},
        "layers": [{"digest": sha256(blob), "size": len(blob)} for blob in blobs],
    }
    digest = store.put(json.dumps(manifest).encode())
    store.name(Named(name, digest))
    return digest


def layer_file(path: Path, *entries: Entry) -> tuple[Path, str]:
    """Write a layer as a gzip file and return it with its diff id."""
    tar = make_tar(*entries)
    path.write_bytes(gzip.compress(tar, mtime=0))
    return path, sha256(tar)


Push = Callable[..., Awaitable[None]]
Make = Callable[..., Any]
Bring = Callable[..., Awaitable[list[Pulled]]]


@dataclass
class MirrorReport:
    """The results of a mirror run."""

    images: list[Mirrored]

    @property
    def failed(self) -> list[Mirrored]:
        return [image for image in self.images if image.error]

    @property
    def moved_bytes(self) -> int:
        return sum(image.moved_bytes for image in self.images)


def failure(results: Sequence[Pulled | Mirrored]) -> str:
    """The one error of a pull or a mirror run, with its hint."""
    (error,) = [result.error for result in results if result.error]
    assert isinstance(error, ImageError)
    assert error.hint
    return f"{error} | {error.hint}"


def leftovers(store: Store) -> list[Path]:
    """What a failed pull should not leave: names, half blobs, half layers, unpacked layers."""
    folders = ("names", "work", "layers")
    return [path for name in folders for path in (store.root / name).glob("*")]
