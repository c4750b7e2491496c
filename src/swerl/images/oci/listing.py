"""What an unpacked layer holds, file by file, so that a changed one is found and named."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote


def make_listing(root: Path, sums: Mapping[bytes, str] | None = None) -> str:
    """Return one line per file: kind, mode, size, mtime, content or target, path.

    `sums` has the SHA-256 of each regular file where known; without it all are read. Raises
    OSError.
    """
    return "".join(f"{line}\n" for line in _lines(str(root), "", sums))


def differences(listing: str, root: Path) -> list[str]:
    """Return the paths that are not as listed: changed, missing or new. Raises OSError."""
    known = _by_path(listing)
    found = _by_path(make_listing(root))
    return sorted(path for path in known.keys() | found if known.get(path) != found.get(path))


def _lines(root: str, folder: str, sums: Mapping[bytes, str] | None) -> Iterator[str]:
    with os.scandir(f"{root}/{folder}") as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = folder + entry.name
        yield _line(entry, path, sums)
        if entry.is_dir(follow_symlinks=False):
            yield from _lines(root, path + "/", sums)


def _line(entry: os.DirEntry[str], path: str, sums: Mapping[bytes, str] | None) -> str:
    found = entry.stat(follow_symlinks=False)
    mode, size, time_s, what = found.st_mode, 0, found.st_mtime_ns // 10**9, "-"
    if stat.S_ISREG(mode):
        size = found.st_size
        what = _sum(entry) if sums is None else sums[os.fsencode(path)]
    elif stat.S_ISLNK(mode):
        what = _quoted(str(Path(entry.path).readlink()))
    elif stat.S_ISDIR(mode):  # a folder without a time of its own was made at an arbitrary one
        time_s = 0
        what = ",".join(sorted(n for n in os.listxattr(entry.path) if "overlay" in n)) or "-"
    elif stat.S_ISCHR(mode):
        time_s = 0
    return f"{mode:o} {size} {time_s} {what} {_quoted(path)}"


def _sum(entry: os.DirEntry[str]) -> str:
    with Path(entry.path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _quoted(name: str) -> str:
    return quote(name, errors="surrogateescape")


def _by_path(listing: str) -> dict[str, str]:
    return {line.rpartition(" ")[2]: line for line in listing.splitlines()}
