"""What overlayfs makes of unpacked layers: which folders are opaque, which file a path names.

A path is looked up without a mount. Links in it are followed as if the overlay were `/`, so none
leads out.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
"""The first counts in a mount by root, the second in one with `userxattr`."""
MAX_LINKS = 40
"""Links followed in one path, as in Linux."""
_CANNOT = {errno.EPERM, errno.EOPNOTSUPP}


def find(path: bytes, layers: Sequence[Path]) -> bytes:
    """Return where a file is on the host; a link at the path's end is not followed.

    `layers` come highest first. Raises FileNotFoundError, and OSError on links in a circle.
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
            raise FileNotFoundError(errno.ENOENT, "no layer holds it", path)
        if stat.S_ISLNK(os.lstat(places[0]).st_mode) and todo:
            num_links += 1
            if num_links > MAX_LINKS:
                raise OSError(errno.ELOOP, "links lead in a circle", path)
            target = os.readlink(places[0])  # noqa: PTH115  bytes, as below
            real = [root] if target.startswith(b"/") else real
            todo.extendleft(reversed(target.split(b"/")))
        else:
            real.append(places)
    return real[-1][0]


def set_opaque(fd: int) -> None:
    """Hide all that lower layers have in an open folder. Raises OSError."""
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
    """Return what a name stands for in merged folders, highest first: a file, or folders."""
    found: list[bytes] = []
    for folder in folders:
        place = os.path.join(folder, name)  # noqa: PTH118  bytes: names need not be text
        try:
            kind = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        is_folder = stat.S_ISDIR(kind.st_mode)
        is_hidden = stat.S_ISCHR(kind.st_mode) and kind.st_rdev == 0
        if not is_folder:
            return found or ([] if is_hidden else [place])
        found.append(place)
        if any(each in _OPAQUE for each in os.listxattr(place)):
            break
    return found
