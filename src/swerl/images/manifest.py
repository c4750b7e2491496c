"""Manifests, indexes and configs: their bytes, digests and blobs, and the choice of a platform."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swerl.core.errors import ImageError
from swerl.core.image_reference import checked_digest

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
"""Most bytes of a manifest, an index or a config: registries refuse larger ones too."""

_ANEW = "build and push the image again"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of content by digest. `size` in bytes."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Config:
    """The parts of an image's config that concern its layers and processes."""

    diff_ids: tuple[str, ...]
    """Digest of each layer's uncompressed tar, lowest first."""
    env: Mapping[str, str]
    platform: tuple[str, str] = ("", "")
    """OS and architecture; empty if it names none."""

    def require_platform(self, platform: tuple[str, str], image: str) -> None:
        """Raise ImageError if the image is for another machine."""
        pairs = zip(self.platform, platform, strict=True)
        if any(part and part != expected for part, expected in pairs):
            raise ImageError(
                f"{image} is for {'/'.join(self.platform)}, not for {'/'.join(platform)}",
                hint="build it for this machine, or run on a machine of that kind",
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest or index, byte for byte as the registry stores it."""

    name: str
    """The requested image name, for messages."""
    body: bytes
    media_type: str

    @property
    def digest(self) -> str:
        return sha256(self.body)

    @property
    def is_index(self) -> bool:
        """True if it lists one manifest per platform."""
        return self.media_type in INDEX_TYPES

    def platform_digest(self, platform: tuple[str, str] = PLATFORM) -> str:
        """Return the digest of an index's image for (OS, architecture). Raises ImageError.

        Without one, the first entry that names no platform is returned.
        """
        platforms, unmarked = [], ""
        try:
            for entry in self._document().get("manifests", []):
                described = entry.get("platform") or {}
                if (described.get("os"), described.get("architecture")) == platform:
                    return checked_digest(entry["digest"], self.name)
                if not described:
                    unmarked = unmarked or checked_digest(entry["digest"], self.name)
                platforms.append(f"{described.get('os')}/{described.get('architecture')}")
        except (KeyError, TypeError, AttributeError) as error:
            raise self._garbled(error) from error
        if unmarked:  # its config names the platform
            return unmarked
        raise ImageError(
            f"{self.name} has no image for {'/'.join(platform)}",
            hint=f"it has {', '.join(platforms) or 'none at all'}",
        )

    def config(self) -> Blob:
        """Return an image's config. Raises ImageError if this is not an image."""
        return self._entries()[0]

    def layers(self) -> list[Blob]:
        """Return an image's layers, lowest first; one may occur twice. Raises ImageError."""
        return self._entries()[1:]

    def blobs(self) -> list[Blob]:
        """Return an image's config and layers, each once. Raises ImageError for another kind."""
        return list(dict.fromkeys(self._entries()))

    def _entries(self) -> list[Blob]:
        if self.media_type not in IMAGE_TYPES:
            raise ImageError(
                f"{self.name} has an unknown media type: {self.media_type}",
                hint="build and push it again with a current tool",
            )
        document = self._document()
        try:
            entries = [document["config"], *document["layers"]]
            blobs = [Blob(checked_digest(e["digest"], self.name), int(e["size"])) for e in entries]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._garbled(error) from error
        if any(blob.size < 0 for blob in blobs):
            raise ImageError(f"the manifest of {self.name} has a blob of negative size", hint=_ANEW)
        return blobs

    def _document(self) -> dict[str, Any]:
        return _parse(self.body, f"the manifest of {self.name}")

    def _garbled(self, error: Exception) -> ImageError:
        lacks = "lacks" if isinstance(error, KeyError) else "is malformed:"
        return ImageError(f"the manifest of {self.name} {lacks} {error}", hint=_ANEW)


def read_config(body: bytes, manifest: Manifest) -> Config:
    """Read an image's config. Raises ImageError if it does not match the manifest."""
    what = f"the config of {manifest.name}"
    document = _parse(body, what)
    try:
        diff_ids = [checked_digest(diff_id, what) for diff_id in document["rootfs"]["diff_ids"]]
        settings: dict[str, Any] = document.get("config") or {}
        pairs = [str(pair).partition("=") for pair in settings.get("Env") or []]
        platform = str(document.get("os") or ""), str(document.get("architecture") or "")
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"{what} has a missing or malformed field: {error}", hint=_ANEW) from error
    num_layers = len(manifest.layers())
    if len(diff_ids) != num_layers:
        raise ImageError(
            f"{what} lists {len(diff_ids)} layers, but its manifest {num_layers}", hint=_ANEW
        )
    env = {name: value for name, _, value in pairs if name}
    return Config(tuple(diff_ids), env, platform)


def declared_type(body: bytes) -> str:
    """Return the media type in a manifest; empty if it has none, as in old manifests."""
    try:
        return str(json.loads(body).get("mediaType") or "")
    except (ValueError, AttributeError, RecursionError):
        return ""


def sha256(data: bytes) -> str:
    """Return the digest of some bytes in a registry's form."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def machine_platform() -> tuple[str, str]:
    """Return the OS and architecture of this machine's images, as indexes name them."""
    machine = platform.machine()
    return ("linux", _MACHINES.get(machine, machine))


def _parse(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{what} is not JSON", hint=_ANEW) from error
    if isinstance(document, dict):
        return document
    raise ImageError(f"{what} is not a JSON object", hint=_ANEW)
