"""Read and write files in an untrusted directory tree: no link in it leads out of it.

Files of the kernel (procfs, sysfs) are refused: they would show and take more from the controller
than from a process inside.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from io import FileIO

from swerl.sandboxes import _kernel as kernel

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512
"""Unit of `st_blocks` on every file system."""
_KERNEL_FILES = {0x9FA0, 0x6265_6572}
"""Numbers of procfs and sysfs."""


def open_file(root: int, path: str) -> FileIO:
    """Open a regular file for reading. Raises OSError, FileNotFoundError among them."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    return _regular(kernel.openat2(root, path, flags), "rb", path)


def read_all(file: FileIO, most: int) -> bytes:
    """Return the file's bytes. Raises OSError if its size exceeds `most` and its blocks do not.

    A sparse file can report a size beyond its disk, and a file that grows during the read would
    never end.
    """
    status = os.fstat(file.fileno())
    if status.st_size > most and status.st_blocks * _BLOCK_BYTES < status.st_size:
        raise OSError(errno.EFBIG, f"it reports a size of {status.st_size:,} bytes", file.name)
    pieces, left = [], status.st_size
    while left > 0 and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def write_file(root: int, path: str, data: bytes, owner: int) -> None:
    """Replace a file's bytes; create it and its parents, owned by `owner`. Raises OSError."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = kernel.openat2(root, path, flags)
    except FileNotFoundError:
        os.close(make_folder(root, posixpath.dirname(path.rstrip("/")), owner))
        fd = kernel.openat2(root, path, flags | os.O_CREAT, 0o644)
        _give(fd, owner)
    with _regular(fd, "wb", path) as file:
        file.truncate(0)
        view = memoryview(data)
        # One write may take only a part of the data.
        while view:
            view = view[file.write(view) :]


def make_folder(root: int, path: str, owner: int | None = None) -> int:
    """Return a descriptor of a folder; create it and its parents. Raises OSError."""
    path, flags = path.rstrip("/") or "/", os.O_PATH | os.O_DIRECTORY
    try:
        return kernel.openat2(root, path, flags)
    except FileNotFoundError:
        above, name = posixpath.split(path)
        parent = make_folder(root, above, owner)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        pass  # a dangling link, or another writer was faster: the open below decides
    else:
        if owner is not None:
            made = os.open(name, _FOLDER, dir_fd=parent)
            _give(made, owner)
            os.close(made)
    finally:
        os.close(parent)
    return kernel.openat2(root, path, flags)


def make_file(root: int, path: str) -> int:
    """Return a descriptor of a file; create it, empty, and its parents. Raises OSError."""
    os.close(make_folder(root, posixpath.dirname(path.rstrip("/"))))
    try:
        return kernel.openat2(root, path, os.O_PATH)
    except FileNotFoundError:
        return kernel.openat2(root, path, os.O_WRONLY | os.O_CREAT, 0o644)


def _give(fd: int, owner: int) -> None:
    if os.fstat(fd).st_uid != owner:
        os.fchown(fd, owner, owner)


def _regular(fd: int, mode: str, path: str) -> FileIO:
    """Return a file for a descriptor. Raises OSError unless it is a regular file on a disk."""
    kind, is_kernels = os.fstat(fd).st_mode, kernel.file_system(fd) in _KERNEL_FILES
    if stat.S_ISREG(kind) and not is_kernels:
        return FileIO(fd, mode)
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", path)
    reason = "it is a file of the kernel" if is_kernels else "it is not a regular file"
    raise OSError(errno.EINVAL, reason, path)
