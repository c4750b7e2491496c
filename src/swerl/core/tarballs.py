"""Unpack untrusted archives."""

from __future__ import annotations

import re
import tarfile
from importlib import import_module
from pathlib import Path
from types import ModuleType


def unpack(archive: Path, folder: Path, *, keep: str = ".*", programs: str = "") -> None:
    """Unpack a tarball into a folder.

    Only members with a whole name that matches `keep` are unpacked; those that match `programs`
    become executable. Raises ValueError if it is not a tarball or a member leads out of the
    folder, and OSError if the disk refuses.
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
        raise ValueError(f"{archive.name} cannot be unpacked: {error}") from error


def _tarfile() -> ModuleType:
    """Return `tarfile`, or its backport: before Python 3.11.4 it has no safe filter."""
    return tarfile if hasattr(tarfile, "data_filter") else import_module("backports.tarfile")
