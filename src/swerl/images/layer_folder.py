"""Make files below one folder from untrusted names.

A folder is opened part by part from the folder's own descriptor, and never through a link, so no
name and no link leads out. Files belong to the caller. Set-user-id bits are dropped: sandboxes
ignore them, and on the host they are dangerous. A hidden file of a lower layer is marked as
overlayfs requires: a character device 0:0 for a name, an attribute for a whole folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 250
_MAX_TIME_S = 2**33
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
"""The first is used in a mount by root, the second in one with `userxattr`."""
_CANNOT = {errno.EPERM, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class FileMeta:
    mode: int
    mtime_s: float


class Folder:
    """One folder while it is filled. Methods raise OSError, also for a path below a link."""

    def __init__(self, path: Path) -> None:
        """Open an empty folder."""
        self._root = os.open(path, _OPEN)
        self._path, self._fd = b"", os.dup(self._root)
        self._times: dict[bytes, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            # Making files in a folder changes its time, so it is set last.
            for path, mtime_s in self._times.items() if kind is None else ():
                os.utime(self._open(path), ns=_ns(mtime_s))
        finally:
            os.close(self._fd)
            os.close(self._root)

    def write(self, path: bytes, pieces: Iterable[bytes], meta: FileMeta) -> None:
        folder, name = self._place(path)
        with os.fdopen(os.open(name, _CREATE, 0o600, dir_fd=folder), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), meta.mode & 0o1777 | 0o600)
            os.utime(file.fileno(), ns=_ns(meta.mtime_s))

    def make_folder(self, path: bytes, meta: FileMeta) -> None:
        """Make a folder, or change the existing one."""
        if path:
            above, _, name = path.rpartition(b"/")
            if stat.S_ISLNK(_kind(self._open(above), name)):
                os.unlink(name, dir_fd=self._fd)
        os.fchmod(self._open(path), meta.mode & 0o1777 | 0o700)
        self._times[path] = meta.mtime_s

    def symlink(self, path: bytes, target: bytes, meta: FileMeta) -> None:
        """Make a symbolic link; its target is not checked here."""
        folder, name = self._place(path)
        os.symlink(target, name, dir_fd=folder)
        os.utime(name, ns=_ns(meta.mtime_s), dir_fd=folder, follow_symlinks=False)

    def link(self, path: bytes, target: bytes) -> None:
        """Make another name of a file of this folder."""
        if path == target:
            return
        above, _, source_name = target.rpartition(b"/")
        source = os.dup(self._open(above))
        try:
            if stat.S_ISDIR(_kind(source, source_name)):
                raise OSError(errno.EISDIR, "a layer links a folder twice", target)
            folder, name = self._place(path)
            os.link(source_name, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(source)

    def fifo(self, path: bytes, meta: FileMeta) -> None:
        folder, name = self._place(path)
        os.mkfifo(name, meta.mode & 0o777 | 0o600, dir_fd=folder)

    def hide(self, path: bytes) -> None:
        """Hide a name of lower layers; an entry of this layer itself stays."""
        above, _, name = path.rpartition(b"/")
        kind = _kind(self._open(above), name)
        if not kind:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=self._fd)
        elif stat.S_ISDIR(kind):
            self.make_opaque(path)

    def make_opaque(self, path: bytes) -> None:
        """Hide the content of a folder in lower layers."""
        _set_opaque(self._open(path))

    def _place(self, path: bytes) -> tuple[int, bytes]:
        """Return the folder and the name of a new file; an earlier file there is removed."""
        above, _, name = path.rpartition(b"/")
        folder = self._open(above)
        kind = _kind(folder, name) if name else stat.S_IFDIR
        if stat.S_ISDIR(kind):
            raise OSError(errno.EISDIR, "a layer replaces a folder by a file", path)
        if kind:
            os.unlink(name, dir_fd=folder)
        return folder, name

    def _open(self, path: bytes) -> int:
        """Open a folder, made if it is missing; its descriptor is valid until the next call."""
        if path == self._path:
            return self._fd
        if path.count(b"/") > _MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, "a layer nests its folders too deep", path[:80])
        fd = os.dup(self._root)
        for name in path.split(b"/") if path else ():
            above = fd
            try:
                fd = _enter(above, name)
            finally:
                os.close(above)
        os.close(self._fd)
        self._path, self._fd = path, fd
        return fd


def _enter(above: int, name: bytes) -> int:
    """Open a folder in an open folder, made if it is missing."""
    try:
        return os.open(name, _OPEN, dir_fd=above)
    except OSError:
        kind = _kind(above, name)
        if kind and not stat.S_ISCHR(kind):
            raise
    if kind:  # removed and made again: hide the lower one
        os.unlink(name, dir_fd=above)
    os.mkdir(name, 0o755, dir_fd=above)
    fd = os.open(name, _OPEN, dir_fd=above)
    if kind:
        _set_opaque(fd)
    return fd


def _set_opaque(fd: int) -> None:
    """Hide the content of an open folder in all lower layers. Raises OSError."""
    failures = []
    for name in OPAQUE:
        try:
            os.setxattr(fd, name, b"y")
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            failures.append(error)
    if len(failures) == len(OPAQUE):
        raise failures[-1]


def _kind(folder: int, name: bytes) -> int:
    """Return the mode of a file, which is not followed; 0 if it is missing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _ns(time_s: float) -> tuple[int, int]:
    time_ns = int(min(max(time_s, 0), _MAX_TIME_S) * 10**9)
    return (time_ns, time_ns)
