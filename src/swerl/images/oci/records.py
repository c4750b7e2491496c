"""What a store knows of an image, of a name and of an unpacked layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
    workdir: str
    user: str
    """As the image has it: a name or number, with or without a group; empty for root."""
    size: int
    """Bytes of its unpacked files."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name of an image in the store."""

    reference: str
    digest: str
    """Digest of the manifest for this machine."""
    source: str = ""
    """Where it was pulled from, by digest; empty for one that was imported."""
    pulled_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """What the store notes about an unpacked layer, as `layer.json`."""

    diff_id: str
    num_bytes: int
    """Bytes of its files."""
    num_files: int
    listing: str
    """Digest of the file `listing` beside it."""
