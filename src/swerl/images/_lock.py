"""The lock file of a mirror: which digest each task image stands for, and where it is kept."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.errors import ImageError, InputError

_SAVE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Pinned:
    """One mirrored image."""

    source: str
    """Where it was read, by tag or digest."""
    digest: str
    """Digest of its linux/amd64 manifest, the same on both sides."""
    reference: str
    """Name to pull it by from the mirror."""
    size_bytes: int
    """Compressed size of its blobs, shared ones included."""


class Lock:
    """Task image -> Pinned, kept in a JSON file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        """Read the file where it exists. Raises InputError on one that is no lock file."""
        self.path = path
        self._saved_s = float("-inf")
        self.images: dict[str, Pinned] = _read(path)

    def put(self, image: str, pinned: Pinned) -> None:
        """Add an image. The file follows within a second; `save` ends the wait."""
        self.images[image] = pinned
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file under a temporary name, then rename. Raises ImageError."""
        rows = {image: asdict(pinned) for image, pinned in sorted(self.images.items())}
        temporary = self.path.with_name(self.path.name + ".part")
        try:
            temporary.write_text(json.dumps({"images": rows}, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise ImageError(
                f"cannot write lock file {self.path}: {error.strerror}",
                hint="name another place with --lock",
            ) from error
        self._saved_s = time.monotonic()


def _read(path: Path) -> dict[str, Pinned]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["images"]
        return {image: Pinned(**row) for image, row in rows.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no lock file of images: {error}",
            hint="name another file with --lock, or delete it",
        ) from error
