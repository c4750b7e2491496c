"""Which local sandboxes exist, whoever opened them, and how to remove one whose owner is dead.

A sandbox shows itself in its warden's command line; what outlives a warden that was killed
together with its spawner is named for the sandbox: its cgroups and its scratch folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.core.liveness import Life, boot_time_s, life_at, start_time_s
from swerl.sandboxes._local import cgroup, title

_LEEWAY_S = 2.0
"""How far the two clocks that a process's and a folder's ages are read from may differ."""
_ROUNDS, _PAUSE_S = 400, 0.005
_DEATH_S = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A sandbox, or what is left of one."""

    name: str
    pid: int = 0
    """Its warden; 0 where only folders are left."""
    image: str = ""
    started_unix_s: float = 0.0


def take(scratch: Path | None) -> list[Seen]:
    """Return the sandboxes on this machine that this user may see, living ones first."""
    found = {seen.name: seen for seen in _wardens()}
    for path in _folders(cgroup.find(), scratch):
        with suppress(OSError):  # its own spawner was faster
            found.setdefault(path.name, Seen(path.name, started_unix_s=path.stat().st_mtime))
    return list(found.values())


def remove(name: str, scratch: Path | None) -> bool:
    """Kill a sandbox and clear away all that is left of it; say whether all is gone."""
    for seen in _wardens():
        if seen.name == name:
            _kill(seen)
    groups = cgroup.find()
    for _ in range(_ROUNDS):
        if cgroup.remove(groups, name):
            break
        time.sleep(_PAUSE_S)
    if scratch:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return not any(path.name == name for path in _folders(groups, scratch))


def owner_lives(made: Path) -> bool:
    """Return whether the controller named in a folder `swerl-<pid>-<token>` may still run.

    If its process id belongs to another pid namespace, nothing is known but that it did not
    survive a reboot.
    """
    _, pid, token = (*made.name.split("-"), "", "")[:3]
    try:
        made_s = made.stat().st_mtime
    except OSError:
        return False
    life = Life.ELSEWHERE
    if pid.isdigit():
        life = life_at(int(pid), token[:6], made_s, slack_s=_LEEWAY_S)
    return life is Life.ALIVE or (life is Life.ELSEWHERE and made_s + _LEEWAY_S > boot_time_s())


def _wardens() -> Iterator[Seen]:
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  paths cost a third more
        words = title.read(int(name))
        if len(words) < 2 or words[0] != title.WARDEN:
            continue
        with suppress(OSError):  # it ended meanwhile
            if _may_be_ours(int(name)):
                image = words[2] if len(words) > 2 else ""
                yield Seen(words[1], int(name), image, start_time_s(int(name)))


def _may_be_ours(pid: int) -> bool:
    """Say whether a process is this user's or seen by root, and not one inside a sandbox.

    Those could call themselves a warden; each has a second number, in its own namespace.
    """
    theirs, own = _status(pid), _status(os.getpid())
    same_namespace = len(theirs.get("NSpid", "")) == len(own.get("NSpid", ""))
    return same_namespace and own["Uid"][1] in ("0", theirs["Uid"][1])


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: values.split() for key, _, values in (line.partition(":") for line in lines)}


def _folders(groups: Mapping[str, Path], scratch: Path | None) -> list[Path]:
    return [*cgroup.leftovers(groups), *(scratch.glob("swerl-*-*") if scratch else ())]


def _kill(seen: Seen) -> None:
    """Kill a warden, and wait until it and what it started are dead; the rest dies with that."""
    children = Path(f"/proc/{seen.pid}/task/{seen.pid}/children")
    fds = []
    try:
        for pid in (seen.pid, *map(int, children.read_text().split() if children.exists() else ())):
            fds.append(os.pidfd_open(pid))
        if title.read(seen.pid)[1:2] == [seen.name]:  # no other one took its number
            signal.pidfd_send_signal(fds[0], signal.SIGKILL)
            for fd in fds:
                select.select([fd], [], [], _DEATH_S)
    except OSError:
        pass  # it has just ended
    finally:
        for fd in fds:
            os.close(fd)
