"""Copy the changes of a sandbox to a folder of the host.

The tree belongs to code that nobody trusts and may change while it is read. Every folder and file
is opened by its name in the descriptor of the folder above, and never through a link, so nothing
outside is read. Set-user-id bits are dropped, and holes are filled.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 250
_PIECE = 1 << 20
_KEPT_ATTRIBUTES = ("user.", "trusted.overlay.")


def copy_changes(source: int, dest: Path, *, max_bytes: int, stop: threading.Event) -> None:
    """Copy the folder with descriptor `source` into the new folder `dest`, with whiteouts.

    Raises OSError, also once `stop` is set, or if the files are larger than `max_bytes` together,
    with their holes.
    """
    dest.mkdir(parents=True)
    copy = _Copy(stop, max_bytes)
    target = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        copy.fill_folder(source, target, b"")
        _copy_facts(source, target)
    finally:
        os.close(target)


@dataclass(slots=True)
class _Copy:
    stop: threading.Event
    left_bytes: int
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    """(device, inode) of a file with several names -> descriptor of its copy."""

    def fill_folder(self, source: int, target: int, path: bytes) -> None:
        if path.count(b"/") > _MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, "its folders are nested too deep", path[:80])
        try:
            for name in os.listdir(source):
                self._copy(source, target, name, path)
        finally:
            if not path:
                for fd in self.links.values():
                    os.close(fd)

    def _copy(self, source: int, target: int, name: str, above: bytes) -> None:
        if self.stop.is_set():
            raise OSError(errno.ECANCELED, "it was stopped")
        path = above + os.fsencode(name)
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            fd = os.open(name, _OPEN, dir_fd=source)
            try:
                # What it is now decides: another file may have taken the name.
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    self._copy_folder(fd, target, name, path)
                elif stat.S_ISREG(os.fstat(fd).st_mode):
                    self._copy_file(fd, target, name, path)
            finally:
                os.close(fd)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            times = status.st_atime_ns, status.st_mtime_ns
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
        elif not stat.S_ISBLK(status.st_mode) and status.st_rdev == 0:  # whiteout, pipe or socket
            os.mknod(name, status.st_mode & ~0o6000, dir_fd=target)

    def _copy_folder(self, source: int, target: int, name: str, path: bytes) -> None:
        os.mkdir(name, 0o700, dir_fd=target)
        fd = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=target)
        try:
            self.fill_folder(source, fd, path + b"/")
            _copy_facts(source, fd)
        finally:
            os.close(fd)

    def _copy_file(self, source: int, target: int, name: str, path: bytes) -> None:
        status = os.fstat(source)
        key = status.st_dev, status.st_ino
        if key in self.links:
            path_of_copy = f"/proc/self/fd/{self.links[key]}"
            os.link(path_of_copy, name, dst_dir_fd=target, follow_symlinks=True)
            return
        with os.fdopen(os.open(name, _CREATE, 0o600, dir_fd=target), "wb") as file:
            left = status.st_size
            if left > self.left_bytes:
                message = "its files are larger than disk_mib, holes included"
                raise OSError(errno.EFBIG, message, os.fsdecode(path))
            self.left_bytes -= left
            while left and (data := os.read(source, min(left, _PIECE))):
                if self.stop.is_set():
                    raise OSError(errno.ECANCELED, "it was stopped")
                left -= file.write(data)
            file.flush()
            _copy_facts(source, file.fileno())
            if status.st_nlink > 1:
                self.links[key] = os.dup(file.fileno())


def _copy_facts(source: int, target: int) -> None:
    """Copy attributes, mode and times of an open file or folder."""
    status = os.fstat(source)
    for name in os.listxattr(source):
        if name.startswith(_KEPT_ATTRIBUTES):
            os.setxattr(target, name, os.getxattr(source, name))
    os.fchmod(target, status.st_mode & 0o1777)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
