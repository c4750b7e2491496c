"""Types and helpers that the tests of pulls and mirrors share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerl.core.errors import ImageError
from swerl.images.mirror import Mirrored
from swerl.images.pull import Pulled
from swerl.images.store import Store

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
