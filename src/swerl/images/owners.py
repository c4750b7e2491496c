"""Track which process uses which parts of a store: one locked file per process.

The file lists the parts in use and identifies the process's temporary files. The kernel drops the
lock when the process ends, so an unlocked file marks a dead owner. A process holds the store's own
lock, shared, for a moment to take something into use. A process that removes things holds it
exclusively, so nothing is removed between the check and the use.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class StoreOwner:
    """This process's entry in a store."""

    def __init__(self, root: Path) -> None:
        """Register the process. Raises OSError."""
        self._root = root
        self._used: Counter[str] = Counter()
        self._guard = threading.Lock()
        self.pid = os.getpid()
        self._name = f"{self.pid}-{secrets.token_hex(4)}"
        for name in ("owners", "work"):
            (root / name).mkdir(parents=True, exist_ok=True)
        path = root / "owners" / self._name
        with locked(root, exclusive=False):
            self._file = path.open("xb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        weakref.finalize(self, _leave, path, self.pid)

    @contextmanager
    def using(self, digests: Iterable[str]) -> Iterator[None]:
        """Protect the parts with these digests from removal."""
        parts = list(digests)
        with locked(self._root, exclusive=False), self._guard:
            self._used.update(parts)
            self._write()
        try:
            yield
        finally:
            with locked(self._root, exclusive=False), self._guard:
                self._used.subtract(parts)
                self._write()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a temporary folder in the store, removed with the context or `remove_leftovers`."""
        path = self._root / "work" / f"{self._name}.{secrets.token_hex(4)}"
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self) -> None:
        self._used = +self._used
        data = "\n".join(self._used).encode()
        os.pwrite(self._file.fileno(), data, 0)
        os.ftruncate(self._file.fileno(), len(data))


def used(root: Path) -> set[str]:
    """Return the parts in use by living processes. Call it under `locked(root, exclusive=True)`."""
    digests: set[str] = set()
    for path in _files(root):
        if _lives(path):
            digests.update(path.read_text().split())
    return digests


def remove_leftovers(root: Path) -> int:
    """Remove the temporary files of dead processes; return their number."""
    with locked(root, exclusive=True):
        dead = [path for path in _files(root) if not _lives(path)]
        living = {path.name for path in _files(root)} - {path.name for path in dead}
        for path in dead:
            path.unlink(missing_ok=True)
        folders = (root / "work").glob("*")
        orphans = [path for path in folders if path.name.split(".")[0] not in living]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)
    return len(orphans)


@contextmanager
def locked(root: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the store's lock, shared or exclusive, for a moment."""
    with (root / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def _files(root: Path) -> list[Path]:
    return sorted((root / "owners").glob("*"))


def _lives(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _leave(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not end its parent's share
        with suppress(OSError):
            path.unlink()
