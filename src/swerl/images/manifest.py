"""Manifests, indexes and configs: their bytes, digests and blobs, and the choice of a platform."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swerl.core.errors import ImageError

PLATFORM = ("linux", "amd64")
"""Platform of public SWE images, and so of a mirror."""
IMAGE_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MAX_DOCUMENT = 4 << 20
"""Most bytes of a manifest, an index or a config: registries refuse larger ones themselves."""

_ANEW = "build and push the image anew"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of content by digest. `size` in bytes."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Config:
    """What an image's config says about its layers and its processes."""

    diff_ids: tuple[str, ...]
    """Digest of each layer's uncompressed tar, lowest first."""
    env: Mapping[str, str]
    workdir: str
    user: str
    """As the image has it: a name or number, with or without a group; empty for root."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest or index, byte for byte as the registry stores it."""

    name: str
    """The image that it was asked for as, for messages."""
    body: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """Digest of its bytes."""
        return sha256(self.body)

    @property
    def is_index(self) -> bool:
        """Whether it lists one manifest a platform."""
        return self.media_type in INDEX_TYPES

    def platform_digest(self, wanted: tuple[str, str] = PLATFORM) -> str:
        """Return the digest of an index's image for (OS, architecture). Raises ImageError."""
        platforms = []
        try:
            for entry in self._document().get("manifests", []):
                found = entry.get("platform") or {}
                if (found.get("os"), found.get("architecture")) == wanted:
                    return checked_digest(entry["digest"], self.name)
                platforms.append(f"{found.get('os')}/{found.get('architecture')}")
        except (KeyError, TypeError, AttributeError) as error:
            raise self._garbled(error) from error
        raise ImageError(
            f"{self.name} has no image for {'/'.join(wanted)}",
            hint=f"it has {', '.join(platforms) or 'none at all'}",
        )

    def config(self) -> Blob:
        """Return an image's config. Raises ImageError on what is no image."""
        return self._entries()[0]

    def layers(self) -> list[Blob]:
        """Return an image's layers, lowest first; one may come twice. Raises ImageError."""
        return self._entries()[1:]

    def blobs(self) -> list[Blob]:
        """Return an image's config and layers, each once. Raises ImageError on another kind."""
        return list(dict.fromkeys(self._entries()))

    def _entries(self) -> list[Blob]:
        if self.media_type not in IMAGE_TYPES:
            raise ImageError(
                f"{self.name} is of a kind that cannot be read: {self.media_type}",
                hint="build and push it anew with a current tool",
            )
        document = self._document()
        try:
            entries = [document["config"], *document["layers"]]
            blobs = [Blob(checked_digest(e["digest"], self.name), int(e["size"])) for e in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise self._garbled(error) from error
        if any(blob.size < 0 for blob in blobs):
            raise ImageError(
                f"the manifest of {self.name} has a blob of less than no bytes", hint=_ANEW
            )
        return blobs

    def _document(self) -> dict[str, Any]:
        return _parse(self.body, f"the manifest of {self.name}")

    def _garbled(self, error: Exception) -> ImageError:
        lacks = "lacks" if isinstance(error, KeyError) else "is garbled:"
        return ImageError(f"the manifest of {self.name} {lacks} {error}", hint=_ANEW)


def read_config(body: bytes, manifest: Manifest) -> Config:
    """Read an image's config. Raises ImageError where it does not fit the manifest."""
    what = f"the config of {manifest.name}"
    document = _parse(body, what)
    try:
        diff_ids = [checked_digest(each, what) for each in document["rootfs"]["diff_ids"]]
        own: dict[str, Any] = document.get("config") or {}
        pairs = [str(pair).partition("=") for pair in own.get("Env") or []]
        workdir, user = str(own.get("WorkingDir") or "/"), str(own.get("User") or "")
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"{what} lacks or misnames a field: {error}", hint=_ANEW) from error
    num_layers = len(manifest.layers())
    if len(diff_ids) != num_layers:
        raise ImageError(
            f"{what} names {len(diff_ids)} layers, its manifest {num_layers}", hint=_ANEW
        )
    env = {name: value for name, _, value in pairs if name}
    return Config(tuple(diff_ids), env, workdir, user)


def declared_type(body: bytes) -> str:
    """Return the media type that a manifest says it has; nothing where it does not say.

    Old ones do not, and what is no manifest does not either.
    """
    try:
        return str(json.loads(body).get("mediaType") or "")
    except (ValueError, AttributeError):
        return ""


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Return for each layer the digest that stands for it and all layers below it.

    OCI image spec 1.1, config.md, "Layer ChainID".
    """
    found = list(diff_ids[:1])
    for diff_id in diff_ids[1:]:
        found.append(sha256(f"{found[-1]} {diff_id}".encode()))
    return found


def sha256(data: bytes) -> str:
    """Return the digest of some bytes as registries write it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def checked_digest(digest: object, where: str) -> str:
    """Return a digest that is safe to ask for and to name a file by. Raises ImageError."""
    if isinstance(digest, str) and _DIGEST.fullmatch(digest):
        return digest
    raise ImageError(f"{where} names {digest!r:.80}, which is no SHA-256 digest", hint=_ANEW)


def machine_platform() -> tuple[str, str]:
    """Return the OS and architecture of images that run on this machine, as indexes name them."""
    machine = platform.machine()
    return ("linux", _MACHINES.get(machine, machine))


def _parse(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise ImageError(f"{what} is not JSON", hint=_ANEW) from error
    if isinstance(document, dict):
        return document
    raise ImageError(f"{what} is no JSON object", hint=_ANEW)
