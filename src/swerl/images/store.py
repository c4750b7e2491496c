"""A content-addressed store of OCI images in one folder, without a daemon.

blobs/sha256/<hex>   manifests, configs and layer files as registries have them
layers/<hex>/        an unpacked layer by its diff id, or a snapshot: `tree/`, `layer.json`
names/<hash>.json    image name -> manifest digest
owners/  work/  lock what processes use at this moment, and what they have half done

Things appear whole, by a rename, so a writer that is killed leaves nothing that a reader could
take for a blob or a layer. Several processes may write at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.image_reference import checked_digest, parse
from swerl.core.secrets import cache_dir
from swerl.images import owners
from swerl.images.manifest import (
    IMAGE_TYPES,
    Blob,
    Config,
    Manifest,
    declared_type,
    read_config,
    sha256,
)
from swerl.images.unpack import unpack


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that is ready to run."""

    reference: str
    """Its full name."""
    digest: str
    """Digest of its manifest."""
    layers: tuple[Path, ...]
    """Unpacked layers for overlayfs, lowest first, each once."""
    env: Mapping[str, str]
    size: int
    """Bytes of its unpacked files."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name of an image in the store."""

    reference: str
    digest: str
    """Digest of the manifest for this machine."""
    source: str = ""
    """Its pinned reference in the registry; empty if it was imported."""
    pulled_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The record of a layer with a sandbox's changes, stored as `snapshot.json` beside the tree."""

    base: str
    """Reference of the image under it."""
    identity: str
    """Text for the content of that image; other content does not fit under the changes."""
    digest: str = ""
    """Digest of the image's manifest, if it is in the store: the snapshot is a part of it."""
    workdir: str = ""
    """Folder inside with the tree; empty: the root."""
    name: str = ""
    """The name that it was taken by, which may name its owner."""


class Store:
    """One store. Methods raise ImageError for absent parts, and OSError for a broken disk."""

    def __init__(self, root: Path) -> None:
        """Open a store; its folders are made with the first image."""
        self.root = root

    # Reading

    def find(self, image: str) -> StoredImage:
        """Return an image by any of its names. Raises ImageError if a part is missing."""
        name = self.named(image)
        manifest = self.manifest(name)
        config = self.config(manifest)
        # The highest of equal layers decides, and overlayfs accepts a folder once.
        ids = list(reversed(dict.fromkeys(reversed(config.diff_ids))))
        return StoredImage(
            reference=name.reference,
            digest=name.digest,
            layers=tuple(map(self.layer_tree, ids)),
            env=config.env,
            size=sum(self._layer_bytes(layer_id, name.reference) for layer_id in ids),
        )

    def named(self, image: str) -> Named:
        """Return a name's record. Raises ImageError, and InputError if the name is malformed."""
        reference = parse(image)
        with suppress(FileNotFoundError, NotADirectoryError):
            return _read_named(self._name_file(str(reference)))
        if reference.digest and self.blob(reference.digest).is_file():
            return Named(str(reference), reference.digest)
        raise _missing(image, f"image {image} is not on this machine")

    def names(self) -> list[Named]:
        """Return all names, oldest first."""
        names = [_read_named(path) for path in (self.root / "names").glob("*.json")]
        return sorted(names, key=lambda name: (name.pulled_unix_s, name.reference))

    def manifest(self, name: Named) -> Manifest:
        body = self.read(name.digest, name.reference)
        return Manifest(name.reference, body, declared_type(body) or IMAGE_TYPES[0])

    def config(self, manifest: Manifest) -> Config:
        return read_config(self.read(manifest.config().digest, manifest.name), manifest)

    def read(self, digest: str, image: str) -> bytes:
        """Return a small blob of `image` (for messages). Its digest is verified."""
        try:
            body = self.blob(digest).read_bytes()
        except FileNotFoundError as error:
            raise _missing(image, f"image {image} lacks {digest} on this machine") from error
        if sha256(body) != digest:
            with suppress(OSError):  # the next pull fetches it again
                self.blob(digest).unlink()
            raise _missing(image, f"{digest} of image {image} is damaged on this machine")
        return body

    def blob(self, digest: str) -> Path:
        """Return the path of a blob, present or not."""
        return self.root / "blobs" / "sha256" / _hex(digest)

    def layer(self, layer_id: str) -> Path:
        """Return the folder of an unpacked layer, present or not."""
        return self.root / "layers" / _hex(layer_id)

    def layer_tree(self, layer_id: str) -> Path:
        """Return the lower directory of an unpacked layer, present or not."""
        return self.layer(layer_id) / "tree"

    def layer_bytes(self, layer_id: str) -> int:
        """Return the bytes of a layer's files. Raises OSError, ValueError, TypeError, KeyError."""
        record = json.loads((self.layer(layer_id) / "layer.json").read_bytes())
        return int(record["num_bytes"])

    def snapshot(self, layer_id: str) -> Snapshot:
        """Return the record of a snapshot. Raises ImageError if there is none, or it is damaged."""
        try:
            return Snapshot(**json.loads((self.layer(layer_id) / "snapshot.json").read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise ImageError(
                f"snapshot {layer_id} is not on this machine",
                hint="take it again; `swerl images gc` removes snapshots that nothing needs",
            ) from error

    def snapshots(self, *, since_s: float = 0.0) -> dict[str, Snapshot]:
        """Return the snapshots that were used since this Unix time, by layer id."""
        snapshots = {}
        for path in (self.root / "layers").glob("*/snapshot.json"):
            with suppress(ImageError, OSError):
                if path.with_name("layer.json").stat().st_mtime < since_s:
                    continue
                layer_id = f"sha256:{path.parent.name}"
                snapshots[layer_id] = self.snapshot(layer_id)
        return snapshots

    def drop_layer(self, layer_id: str) -> None:
        """Remove a layer, unless a sandbox of any process uses it."""
        with self.scratch() as bin, self.exclusive() as in_use:
            if layer_id not in in_use and self.layer(layer_id).exists():
                self.layer(layer_id).rename(bin / "layer")

    def has_blob(self, blob: Blob) -> bool:
        """Return whether a blob has its full size."""
        try:
            return self.blob(blob.digest).stat().st_size == blob.size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def has_layer(self, layer_id: str) -> bool:
        return (self.layer(layer_id) / "layer.json").is_file()

    # Using

    @contextmanager
    def use(self, image: str) -> Iterator[StoredImage]:
        """Find an image and protect its layers from `gc` meanwhile. Raises ImageError."""
        name = self.named(image)
        config = self.config(self.manifest(name))
        with self.using([name.digest, *config.diff_ids]):
            yield self.find(image)

    @contextmanager
    def exclusive(self) -> Iterator[set[str]]:
        """Block other processes from taking parts into use for a moment; yield the parts in use.

        Other parts may then be renamed away, but never removed in place.
        """
        with owners.locked(self._made_root(), exclusive=True):
            yield owners.used(self.root)

    @contextmanager
    def using(self, digests: Iterable[str]) -> Iterator[None]:
        """Protect the parts with these digests from removal. Raises ImageError."""
        with owners.using(self._made_root(), digests):
            yield

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a temporary folder that goes with the context or its process. Raises ImageError."""
        with owners.scratch(self._made_root()) as folder:
            yield folder

    def _made_root(self) -> Path:
        try:
            for folder in (self.root, self.root / "owners", self.root / "work"):
                folder.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)  # images may hold files that other users must not read
        except OSError as error:
            message = f"cannot write the image store {self.root}: {error.strerror}"
            hint = "free some space, correct its permissions, or name another in SWERL_CACHE"
            raise ImageError(message, hint=hint) from error
        return self.root

    # Writing

    def put(self, data: bytes) -> str:
        """Store a small blob and return its digest."""
        digest = sha256(data)
        if not self.has_blob(Blob(digest, len(data))):
            with self.scratch() as folder:
                (folder / "blob").write_bytes(data)
                self.adopt(folder / "blob", digest)
        return digest

    def adopt(self, file: Path, digest: str) -> None:
        """Rename a file, whose digest the caller has checked, to a blob."""
        path = self.blob(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        file.replace(path)

    def add_layer(
        self,
        blob: str,
        diff_id: str,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        """Unpack a stored layer unless it exists. Raises ImageError and leaves nothing.

        Another thread can set `stop` to make it fail soon.
        """
        if self.has_layer(diff_id):
            return
        with self.scratch() as folder:
            tree = folder / "tree"
            tree.mkdir(mode=0o755)
            num_bytes = unpack(self.blob(blob), tree, diff_id, stop=stop)
            self._place_layer(folder, num_bytes, diff_id)
        if not self.has_layer(diff_id):
            raise ImageError(
                f"layer {diff_id} cannot be put into {self.root}",
                hint="check the folder's permissions and run it again",
            )

    def add_snapshot(self, folder: Path, layer_id: str, snapshot: Snapshot) -> None:
        """Make a layer of a temporary folder with `tree` in it. Raises OSError."""
        (folder / "snapshot.json").write_text(json.dumps(asdict(snapshot)) + "\n")
        self._place_layer(folder, _size_of(folder / "tree"), layer_id)

    def _place_layer(self, folder: Path, num_bytes: int, layer_id: str) -> None:
        """Complete a layer's folder and move it to its final path."""
        place = self.layer(layer_id)
        (folder / "layer.json").write_text(json.dumps({"num_bytes": num_bytes}) + "\n")
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and not (place / "layer.json").is_file():  # its record is missing
            place.rename(folder / "damaged")
        with suppress(OSError):  # not empty: another process was faster
            folder.rename(place)

    def name(self, name: Named) -> None:
        """Give an image a name; an earlier owner loses it."""
        path = self._name_file(name.reference)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.scratch() as folder:
            (folder / "name").write_text(json.dumps(asdict(name)) + "\n")
            (folder / "name").replace(path)

    def unname(self, reference: str) -> None:
        """Remove a name; its blobs and layers stay until `gc`."""
        self._name_file(reference).unlink(missing_ok=True)

    def remove_leftovers(self) -> int:
        """Remove the temporary files of killed processes; return their number."""
        if not self.root.is_dir():
            return 0
        return owners.remove_leftovers(self._made_root())

    def _layer_bytes(self, layer_id: str, image: str) -> int:
        try:
            return self.layer_bytes(layer_id)
        except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
            raise _missing(image, f"image {image} lacks a layer on this machine") from error

    def _name_file(self, reference: str) -> Path:
        return self.root / "names" / f"{hashlib.sha256(reference.encode()).hexdigest()[:32]}.json"


def default_store() -> Store:
    """Return the store in the cache folder."""
    return _open(cache_dir() / "store")


@functools.cache
def _open(root: Path) -> Store:
    return Store(root)


def _read_named(path: Path) -> Named:
    try:
        return Named(**json.loads(path.read_bytes()))
    except (PermissionError, ValueError, TypeError) as error:
        raise ImageError(
            f"{path} cannot be read: {error}", hint="remove it and pull the image again"
        ) from error


def _hex(digest: str) -> str:
    return checked_digest(digest, "the store").removeprefix("sha256:")


def _missing(image: str, message: str) -> ImageError:
    return ImageError(message, hint=f"run `swerl images pull {image}`")


def _size_of(tree: Path) -> int:
    """Return the bytes of a folder's regular files."""
    sizes = (path.lstat() for path in tree.rglob("*"))
    return sum(entry.st_size for entry in sizes if stat.S_ISREG(entry.st_mode))
