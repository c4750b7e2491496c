"""The files of an archive by name: a folder, or a tar, packed or not."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from swerl.core.errors import ImageError, InputError


class Files(Protocol):
    """The files of an archive."""

    def has(self, name: str) -> bool:
        """Say whether there is such a file."""

    def tops(self) -> set[str]:
        """Return the names at its top."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file. Raises ImageError where there is none."""


@contextmanager
def opened(path: Path) -> Iterator[Files]:
    """Open a folder or a tar. Raises InputError where it is neither, OSError."""
    if path.is_dir():
        yield _FolderFiles(path)
        return
    try:
        tar = tarfile.open(path)  # noqa: SIM115  closed below
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}", hint="check its name") from error
    except tarfile.ReadError as error:
        raise InputError(
            f"{path} is neither a folder nor a tar",
            hint="write one with `docker save` or `skopeo copy`",
        ) from error
    with tar:
        yield _TarFiles(tar)


class _FolderFiles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def tops(self) -> set[str]:
        return {path.name for path in self._root.iterdir()}

    def open(self, name: str) -> IO[bytes]:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise _absent(name)
        try:
            return path.open("rb")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise _absent(name) from error


class _TarFiles:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members = {member.name.removeprefix("./"): member for member in tar}

    def has(self, name: str) -> bool:
        return name in self._members

    def tops(self) -> set[str]:
        return {name.partition("/")[0] for name in self._members}

    def open(self, name: str) -> IO[bytes]:
        member = self._members.get(name)
        try:
            file = self._tar.extractfile(member) if member else None
        except KeyError:  # a link that leads nowhere
            file = None
        if file is None:
            raise _absent(name)
        return file


def _absent(name: str) -> ImageError:
    return ImageError(f"the archive lacks {name}", hint="save the image again")
