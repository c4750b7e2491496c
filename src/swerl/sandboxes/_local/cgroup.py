"""Memory, process and CPU limits by cgroup, version 1 or 2, where this user may make them.

A sandbox's groups lie below the group of the process that makes it, so that whatever bounds the
controller bounds its sandboxes too. In version 2 a group that holds processes cannot hand its
controllers down; there it is the nearest group above that does and that this user may write.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from swerl.sandboxes._local.wire import Plan

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000


def find(proc: Path = Path("/proc/self")) -> dict[str, Path]:
    """Return controller -> this process's writable group, for the controllers at hand."""
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    found: dict[str, Path] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        for name in _mounted(kind, options, paths, Path(point)):
            path = paths["" if kind == "cgroup2" else name]
            folder = Path(point, os.path.relpath(path, root))
            parent = _handing_down(folder, name, Path(point)) if kind == "cgroup2" else folder
            if parent and os.access(parent, os.W_OK):
                found.setdefault(name, parent)
    return found


def enter(groups: Mapping[str, Path], plan: Plan) -> set[str]:
    """Make the sandbox's groups and move this process in; return the limits that hold."""
    held = set()
    for parent in set(groups.values()):
        folder, unified = parent / plan.id, _is_unified(parent)
        names = [name for name in groups if groups[name] == parent]
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            bounded = {name for name in names if _bound(folder, name, plan, unified=unified)}
            # "0" is this process; a lone thread can move without a wait for the whole machine
            (folder / ("cgroup.procs" if unified else "tasks")).write_text("0")
            held |= bounded
    return held


def remove(groups: Mapping[str, Path], name: str) -> bool:
    """Kill what is left of a dead sandbox and remove its groups; say whether all are gone.

    The kernel refuses while it still counts a process that has just died.
    """
    gone = True
    for parent in set(groups.values()):
        folder = parent / name
        try:
            _kill(folder)
            folder.rmdir()
        except OSError as error:
            gone = gone and error.errno != errno.EBUSY
    return gone


def peak_memory_mib(groups: Mapping[str, Path], name: str) -> float | None:
    """Return the most memory that a sandbox held; None where no group counts it."""
    if "memory" not in groups:
        return None
    for file in ("memory.peak", "memory.max_usage_in_bytes"):
        with suppress(OSError, ValueError):
            return int((groups["memory"] / name / file).read_text()) / 2**20
    return None


def leftovers(groups: Mapping[str, Path]) -> list[Path]:
    """Return all groups that sandboxes made here, dead or alive."""
    return [path for parent in set(groups.values()) for path in parent.glob("swerl-*-*")]


def _kill(folder: Path) -> None:
    killer = folder / "cgroup.kill"
    if killer.exists():
        killer.write_text("1")
        return
    for pid in map(int, (folder / "cgroup.procs").read_text().split()):
        if pid:  # 0 stands for one that this process cannot see
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _mounted(kind: str, options: str, paths: Mapping[str, str], point: Path) -> tuple[str, ...]:
    if kind == "cgroup2":
        return _CONTROLLERS if "" in paths else ()
    listed = options.split()[-1].split(",")
    return tuple(name for name in _CONTROLLERS if name in listed and name in paths)


def _handing_down(folder: Path, name: str, point: Path) -> Path | None:
    """Return the nearest group at or above `folder` whose children get this controller.

    To move a process from one group to another takes the right to write the `cgroup.procs` of
    the nearest group above both, which is the one returned.
    """
    for parent in (folder, *folder.parents):
        if not parent.is_relative_to(point):
            break
        with suppress(OSError):
            controllers = (parent / "cgroup.subtree_control").read_text().split()
            if name in controllers and os.access(parent / "cgroup.procs", os.W_OK):
                return parent
    return None


def _bound(folder: Path, name: str, plan: Plan, *, unified: bool) -> bool:
    """Write one limit; say whether it holds."""
    try:
        for file, value in _limits(name, plan, unified=unified):
            (folder / file).write_text(value)
    except OSError:
        return False
    if unified and name == "memory":
        with suppress(OSError):  # a kernel that does not count swap has no such file
            (folder / "memory.swap.max").write_text("0")
    return True


def _is_unified(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def _limits(name: str, plan: Plan, *, unified: bool) -> list[tuple[str, str]]:
    if name == "pids":
        return [("pids.max", str(plan.num_processes))]
    if name == "memory":
        size = str(plan.memory_mib << 20)
        if unified:
            return [("memory.max", size)]
        return [("memory.limit_in_bytes", size)]
    quota = max(1000, int(plan.num_cpus * _PERIOD_US))
    if unified:
        return [("cpu.max", f"{quota} {_PERIOD_US}")]
    return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
