"""Write files atomically, unpack tarballs, and turn file system errors into clear messages."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from swerl.core.errors import RunError


def shipped_folder(name: str) -> Path:
    """Return a folder that comes with swerl, such as `docs`: in the wheel or the source tree."""
    package = Path(__file__).parents[1]
    in_wheel = package / name
    return in_wheel if in_wheel.is_dir() else package.parents[1] / name


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name in the same folder, then rename."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write under a temporary name in the same folder, then rename. Raises RunError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name in the same folder; rename that file at the end. Raises RunError.

    After an error the file at `path` is as before, and the temporary one is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with disk_errors(path):
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises RunError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"cannot read {path}: {error}", hint="restore it from a backup or a copy"
        ) from error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into one RunError with a remedy."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: "free some disk space, then run the same command again: it resumes",
            errno.EDQUOT: "raise the quota, then run the same command again: it resumes",
            errno.EACCES: "choose a folder you may write to",
            errno.EROFS: "choose a folder you may write to",
        }.get(error.errno or 0, "check the folder, then run the same command again")
        raise RunError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error


def unpack_tarball(archive: Path, folder: Path, *, keep: str = ".*", programs: str = "") -> None:
    """Unpack a tarball into a folder.

    Only members with a whole name that matches `keep` are unpacked; those that match `programs`
    become executable. Raises ValueError if it is not a tarball or a member leads out of the
    folder, and OSError if the disk refuses.
    """
    tar = _tarfile()
    try:
        with tar.open(archive) as file:
            pattern = re.compile(keep, re.DOTALL)
            members = [entry for entry in file.getmembers() if pattern.fullmatch(entry.name)]
            for member in members:
                member.mode |= 0o111 if re.fullmatch(programs, member.name) else 0
            file.extractall(folder, members, filter="data")
    except tar.TarError as error:
        raise ValueError(f"{archive.name} cannot be unpacked: {error}") from error


def _tarfile() -> ModuleType:
    """Return `tarfile`, or its backport: before Python 3.11.4 it has no safe filter."""
    import tarfile

    return tarfile if hasattr(tarfile, "data_filter") else import_module("backports.tarfile")
