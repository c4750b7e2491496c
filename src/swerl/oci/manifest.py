"""Manifests and indexes: their bytes, digests and blobs, and the choice of a platform."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from swerl.errors import ImageError

PLATFORM = ("linux", "amd64")
IMAGE_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of content by digest. `size` in bytes."""

    digest: str
    size: int


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

    def platform_digest(self) -> str:
        """Return the digest of an index's linux/amd64 image. Raises ImageError without one."""
        platforms = []
        for entry in self._document().get("manifests", []):
            platform = entry.get("platform", {})
            if (platform.get("os"), platform.get("architecture")) == PLATFORM:
                return str(entry["digest"])
            platforms.append(f"{platform.get('os')}/{platform.get('architecture')}")
        message = f"{self.name} has no image for {'/'.join(PLATFORM)}"
        raise ImageError(message, hint=f"it has {', '.join(platforms) or 'none at all'}")

    def blobs(self) -> list[Blob]:
        """Return an image's config and layers, each once. Raises ImageError on another kind."""
        if self.media_type not in IMAGE_TYPES:
            message = f"{self.name} is of a kind that cannot be mirrored: {self.media_type}"
            raise ImageError(message, hint="build and push it anew with a current tool")
        document = self._document()
        try:
            entries = [document["config"], *document["layers"]]
            return list(dict.fromkeys(Blob(e["digest"], int(e["size"])) for e in entries))
        except (KeyError, TypeError, ValueError) as error:
            message = f"the manifest of {self.name} lacks {error}"
            raise ImageError(message, hint="build and push the image anew") from error

    def _document(self) -> dict[str, Any]:
        try:
            document = json.loads(self.body)
        except ValueError as error:
            message = f"the manifest of {self.name} is not JSON"
            raise ImageError(message, hint="build and push the image anew") from error
        return document if isinstance(document, dict) else {}


def sha256(data: bytes) -> str:
    """Return the digest of some bytes as registries write it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
