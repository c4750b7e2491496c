"""Track which parts of a store are in use, and by living processes: one locked file per use.

The file lists the parts, and its name is that of the use's temporary folder, if it has one. The
kernel drops the lock when the process ends, so an unlocked file marks a dead one. A process holds
the store's own lock, shared, for a moment to take something into use. A process that removes things
holds it exclusively, so nothing is removed between the check and the use.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def using(root: Path, digests: Iterable[str]) -> Iterator[str]:
    """Protect the parts with these digests from removal; yield the name of the use."""
    path = root / "owners" / secrets.token_hex(8)
    with locked(root, exclusive=False):
        file = path.open("x")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\n".join(digests))
        file.flush()
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
        file.close()


@contextmanager
def scratch(root: Path) -> Iterator[Path]:
    """Make a temporary folder in the store, removed with the context or `remove_leftovers`."""
    with using(root, ()) as name:
        path = root / "work" / name
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def used(root: Path) -> set[str]:
    """Return the parts in use by living processes. Call it under `locked(root, exclusive=True)`."""
    digests: set[str] = set()
    for path in (root / "owners").glob("*"):
        with suppress(FileNotFoundError):
            if _lives(path):
                digests.update(path.read_text().split())
    return digests


def remove_leftovers(root: Path) -> int:
    """Remove the temporary files of dead processes; return their number."""
    with locked(root, exclusive=True):
        files = set((root / "owners").glob("*"))
        dead = {path for path in files if not _lives(path)}
        for path in dead:
            path.unlink(missing_ok=True)
        living = {path.name for path in files - dead}
        orphans = [path for path in (root / "work").glob("*") if path.name not in living]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)
    return len(orphans)


@contextmanager
def locked(root: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the store's lock, shared or exclusive, for a moment."""
    with (root / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def _lives(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
