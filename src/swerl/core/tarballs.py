"""Unpacking archives that others made, whatever they hold."""

from __future__ import annotations

import re
import tarfile
from importlib import import_module
from pathlib import Path
from types import ModuleType


def unpack(archive: Path, folder: Path, *, keep: str = ".*", programs: str = "") -> None:
    """Unpack a tarball into a folder.

    Members are kept whose whole name matches the pattern `keep`; those that match `programs` may
    be executed, whatever the tarball says. Raises ValueError where it is no tarball, or a member
    would lie outside the folder, and OSError where the disk refuses.
    """
    tar = _tarfile()
    try:
        with tar.open(archive) as file:
            kept = re.compile(keep, re.DOTALL)
            members = [one for one in file.getmembers() if kept.fullmatch(one.name)]
            for member in members:
                member.mode |= 0o111 if re.fullmatch(programs, member.name) else 0
            file.extractall(folder, members, filter="data")
    except tar.TarError as error:
        raise ValueError(f"{archive.name} is no archive to unpack: {error}") from error


def _tarfile() -> ModuleType:
    """Return the library's module, or its backport: before 3.11.4 it refuses nothing."""
    return tarfile if hasattr(tarfile, "data_filter") else import_module("backports.tarfile")
