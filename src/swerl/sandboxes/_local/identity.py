"""Who a sandbox's processes are on the host.

Run by an ordinary user, they are that user. Run by root, they are a user of their own, whose
number nothing else on the machine has; what a sandbox shows of root's folders (layers, a workdir's
content, mounts) it shows by mounts that give the folder's owner that number (idmapped mounts).
Where the kernel or a file system cannot do that, they are root, without any of its rights.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from swerl.sandboxes._local import kernel
from swerl.sandboxes._local.wire import Plan

_FIRST_ID, _NUM_IDS = 0x7000_0000, 0x0FFF_FFFF
"""The range that systemd's list of user ids calls unused, above those of containers."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user and group of a sandbox's processes on the host: one number for both."""

    uid: int
    views: Mapping[str, int] = field(default_factory=dict)
    """Host folder -> descriptor of a mount of it in which its owner has this number."""


def of(name: str) -> int:
    """Return the number that the sandbox of this name is to have."""
    return _FIRST_ID + zlib.crc32(name.encode()) % _NUM_IDS


def can_be_other() -> bool:
    """Say whether a process of this user's may become another and still make namespaces."""
    if os.geteuid() != 0:
        return False
    pid = os.fork()
    if pid == 0:
        _try_other()
    return os.waitpid(pid, 0)[1] == 0


def choose(plan: Plan) -> Identity:
    """Return who the sandbox's processes will be, with all views that this takes."""
    own = Identity(os.geteuid())
    if not plan.host_id:
        return own
    spaces: dict[tuple[int, int], int] = {}
    views: dict[str, int] = {}
    try:
        sources = [*plan.layers, *filter(None, [plan.content])]
        for source in [*sources, *(source for source, _ in plan.mounts)]:
            status = Path(source).stat()
            owner = status.st_uid, status.st_gid
            if owner not in spaces:
                spaces[owner] = _user_namespace(owner, plan.host_id)
            views[source] = kernel.view(source, spaces[owner], recursive=source not in sources)
    except OSError:
        for fd in views.values():
            os.close(fd)
        return own
    finally:
        for fd in spaces.values():
            os.close(fd)
    return Identity(plan.host_id, views)


def become(uid: int) -> None:
    """Become this user and group for good, with no others; nothing where one is it already."""
    if os.getresuid() != (uid, uid, uid):
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # /proc/self stays its own


def _try_other() -> NoReturn:
    with suppress(OSError):
        kernel.unshare(kernel.NEWNS)
        become(_FIRST_ID)
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        os._exit(0)
    os._exit(1)


def _user_namespace(owner: tuple[int, int], uid: int) -> int:
    """Return a user namespace that maps a folder's owner to `uid`. Raises OSError."""
    ready, ready_inside = os.pipe()
    held_inside, held = os.pipe()
    pid = kernel.patiently(os.fork)
    if pid == 0:
        os.close(held)
        _hold_user_namespace(ready_inside, held_inside)
    for fd in (ready_inside, held_inside):
        os.close(fd)
    try:
        if os.read(ready, 1):
            for name, mine in zip(("uid_map", "gid_map"), owner, strict=True):
                Path(f"/proc/{pid}/{name}").write_text(f"{mine} {uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    finally:
        for fd in (ready, held):
            os.close(fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _hold_user_namespace(ready: int, held: int) -> NoReturn:
    with suppress(OSError):
        kernel.unshare(kernel.NEWUSER)
        os.write(ready, b"R")
        os.read(held, 1)
    os._exit(0)
