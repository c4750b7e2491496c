"""Make files below one folder from untrusted names.

A parent is opened component by component from the folder's own descriptor. A link in it is followed
by hand, as if the folder were `/`, so no name and no link leads out. Files belong to the caller,
who may always read, change and remove them. Set-user-id bits are dropped: sandboxes ignore them,
and on the host they are dangerous. A hidden file of a lower layer is marked as overlayfs requires:
a character device 0:0 for a name, an attribute for a whole folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_OPEN = 64
_MAX_DEPTH = 250
_MAX_TIME_S = 2**33
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
"""The first is used in a mount by root, the second in one with `userxattr`."""
MAX_LINKS = 40
"""Links followed in one path, as in Linux."""
_CANNOT = {errno.EPERM, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class FileMeta:
    mode: int
    size: int
    mtime_s: float


@dataclass(frozen=True, slots=True)
class _Destination:
    """The destination of a file: its folder's descriptor, its name, and its path without links."""

    fd: int
    name: bytes
    path: bytes


class Folder:
    """One folder while it is filled. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        """Open an empty folder."""
        self._path = path
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: OrderedDict[bytes, int] = OrderedDict()
        self._times: dict[bytes, float] = {}
        self._hidden: set[bytes] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._set_times()
        finally:
            self._close_all()
            os.close(self._root)

    def write(self, path: bytes, pieces: Iterable[tuple[int, bytes]], meta: FileMeta) -> None:
        """Write a file from (offset, data) in order."""
        _, fd = self._replace(path, lambda to: os.open(to.name, _CREATE, 0o600, dir_fd=to.fd))
        try:
            fill(fd, pieces, meta.size)
            os.fchmod(fd, meta.mode & 0o1777 | 0o600)
            os.utime(fd, ns=_ns(meta.mtime_s))
        finally:
            os.close(fd)

    def make_folder(self, path: bytes, meta: FileMeta) -> None:
        """Make a folder, or change the existing one."""
        if path:
            place = self._place(path)
            mode = _kind(place)
            if mode is not None and not stat.S_ISDIR(mode):
                self._remove(place)
                mode = None
            if mode is None:
                self._mkdir(place)
            path = place.path
        os.fchmod(self._fd(path), meta.mode & 0o1777 | 0o700)
        self._times[path] = meta.mtime_s

    def symlink(self, path: bytes, target: bytes, meta: FileMeta) -> None:
        """Make a symbolic link; its target is not checked here."""
        place, _ = self._replace(path, lambda to: os.symlink(target, to.name, dir_fd=to.fd))
        os.utime(place.name, ns=_ns(meta.mtime_s), dir_fd=place.fd, follow_symlinks=False)

    def link(self, path: bytes, target: bytes) -> None:
        """Make another name of a file of this folder."""
        origin = find(target, [self._path])
        if stat.S_ISDIR(os.lstat(origin).st_mode):
            raise OSError(errno.EISDIR, "a layer links a folder twice", target)
        source = self._place(origin.removeprefix(os.fsencode(self._path) + b"/"))
        fd = os.open(source.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source.fd)
        try:
            if self._place(path).path == source.path:
                return
            self._replace(path, lambda to: _link(fd, to))
        finally:
            os.close(fd)

    def fifo(self, path: bytes, meta: FileMeta) -> None:
        mode = meta.mode & 0o777 | 0o600
        self._replace(path, lambda to: os.mkfifo(to.name, mode, dir_fd=to.fd))

    def hide(self, path: bytes) -> None:
        """Hide a name of lower layers; an entry of this layer itself stays."""
        place = self._place(path)
        mode = _kind(place)
        if mode is None:
            os.mknod(place.name, stat.S_IFCHR, 0, dir_fd=place.fd)
            self._hidden.add(place.path)
        elif stat.S_ISDIR(mode):
            set_opaque(self._fd(place.path))

    def make_opaque(self, path: bytes) -> None:
        """Hide the content of a folder in lower layers."""
        set_opaque(self._fd(self._real(path)))

    def _place(self, path: bytes) -> _Destination:
        """Return the destination of a file; make the folders above it."""
        above, _, name = path.rpartition(b"/")
        if not name:
            raise OSError(errno.EISDIR, "a layer replaces its root")
        try:
            fd = self._fd(above)
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                raise
            above = self._real(above)
            fd = self._fd(above)
        return _Destination(fd, name, above + b"/" + name if above else name)

    def _fd(self, path: bytes) -> int:
        """Open a folder by a path without links; make the missing parts."""
        if not path:
            return self._root
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if path.count(b"/") > _MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, "a layer nests its folders too deep", path[:80])
        above, _, name = path.rpartition(b"/")
        place = _Destination(self._fd(above), name, path)
        try:
            fd = os.open(name, _OPEN, dir_fd=place.fd)
        except FileNotFoundError:
            self._mkdir(place)
            fd = os.open(name, _OPEN, dir_fd=place.fd)
        self._open[path] = fd
        if len(self._open) > _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def _real(self, path: bytes) -> bytes:
        """Follow the links of a folder's path as if this folder were `/`."""
        todo = deque(path.split(b"/"))
        real: list[bytes] = []
        num_links = 0
        while todo:
            part = todo.popleft()
            if part == b"..":
                del real[-1:]
            elif part not in {b"", b"."}:
                place = _Destination(self._fd(b"/".join(real)), part, b"/".join([*real, part]))
                mode = _kind(place)
                if mode is not None and stat.S_ISLNK(mode):
                    num_links += 1
                    if num_links > MAX_LINKS:
                        raise OSError(errno.ELOOP, "the links form a circle", path)
                    target = os.readlink(part, dir_fd=place.fd)
                    real = [] if target.startswith(b"/") else real
                    todo.extendleft(reversed(target.split(b"/")))
                else:
                    if place.path in self._hidden and mode == stat.S_IFCHR:
                        os.unlink(part, dir_fd=place.fd)
                        self._mkdir(place)
                    real.append(part)
        return b"/".join(real)

    def _mkdir(self, place: _Destination) -> None:
        os.mkdir(place.name, 0o755, dir_fd=place.fd)
        if place.path in self._hidden:  # removed and made again: hide the lower one
            self._hidden.discard(place.path)
            set_opaque(self._fd(place.path))

    def _replace(
        self, path: bytes, make: Callable[[_Destination], int | None]
    ) -> tuple[_Destination, int]:
        """Call `make` with the destination, in place of an existing file."""
        place = self._place(path)
        try:
            return place, make(place) or 0
        except FileExistsError:
            self._remove(place)
        place = self._place(path)
        return place, make(place) or 0

    def _remove(self, place: _Destination) -> None:
        """Remove the existing file; open descriptors of folders become stale."""
        mode = _kind(place)
        if mode is not None and stat.S_ISDIR(mode):
            self._close_all()
            fd = self._fd(place.path.rpartition(b"/")[0])
            shutil.rmtree(os.fsdecode(place.name), dir_fd=fd)
            gone = [path for path in self._times if (path + b"/").startswith(place.path + b"/")]
            for path in gone:
                del self._times[path]
        else:
            os.unlink(place.name, dir_fd=place.fd)

    def _set_times(self) -> None:
        """Set the times of folders last: making files in them changes the times."""
        for path, mtime_s in self._times.items():
            os.utime(self._fd(path), ns=_ns(mtime_s))

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _link(fd: int, place: _Destination) -> None:
    os.link(f"/proc/self/fd/{fd}", place.name, dst_dir_fd=place.fd, follow_symlinks=True)


def _kind(place: _Destination) -> int | None:
    try:
        return os.stat(place.name, dir_fd=place.fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _ns(time_s: float) -> tuple[int, int]:
    time_ns = int(min(max(time_s, 0), _MAX_TIME_S) * 10**9)
    return (time_ns, time_ns)


def find(path: bytes, layers: Sequence[Path]) -> bytes:
    """Return the host path of a file in stacked layers; a final link is not followed.

    `layers` come highest first. No mount is needed, and links are followed as if the overlay were
    `/`. Raises FileNotFoundError, and OSError for a circle of links.
    """
    root = [os.fsencode(layer) for layer in layers]
    todo, real, num_links = deque(path.split(b"/")), [root], 0
    while todo:
        part = todo.popleft()
        if part in {b"", b"."}:
            continue
        if part == b"..":
            real = real[: max(len(real) - 1, 1)]
            continue
        places = _look(part, real[-1])
        if not places:
            raise FileNotFoundError(errno.ENOENT, "no layer has it", path)
        if stat.S_ISLNK(os.lstat(places[0]).st_mode) and todo:
            num_links += 1
            if num_links > MAX_LINKS:
                raise OSError(errno.ELOOP, "the links form a circle", path)
            target = os.readlink(places[0])  # noqa: PTH115  bytes, as below
            real = [root] if target.startswith(b"/") else real
            todo.extendleft(reversed(target.split(b"/")))
        else:
            real.append(places)
    return real[-1][0]


def set_opaque(fd: int) -> None:
    """Hide the content of an open folder in all lower layers. Raises OSError."""
    failures = []
    for name in _OPAQUE:
        try:
            os.setxattr(fd, name, b"y")
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            failures.append(error)
    if len(failures) == len(_OPAQUE):
        raise failures[-1]


def _look(name: bytes, folders: Sequence[bytes]) -> list[bytes]:
    """Return the host paths of a name in merged folders, highest first: one file, or folders."""
    places: list[bytes] = []
    for folder in folders:
        place = os.path.join(folder, name)  # noqa: PTH118  bytes: names need not be text
        try:
            kind = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        is_folder = stat.S_ISDIR(kind.st_mode)
        is_hidden = stat.S_ISCHR(kind.st_mode) and kind.st_rdev == 0
        if not is_folder:
            return places or ([] if is_hidden else [place])
        places.append(place)
        if any(attribute in _OPAQUE for attribute in os.listxattr(place)):
            break
    return places


def fill(fd: int, pieces: Iterable[tuple[int, bytes]], size: int) -> None:
    """Write pieces at their offsets; the rest of the file's `size` is holes."""
    end = 0
    for offset, data in pieces:
        view = memoryview(data)
        end = offset + len(data)
        while view:
            view = view[os.pwrite(fd, view, end - len(view)) :]
    if end < size:
        os.ftruncate(fd, size)
