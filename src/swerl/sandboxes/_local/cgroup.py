"""Memory, process and CPU limits by cgroup, version 1 or 2, where this user may make them.

A sandbox's groups lie below the group of the process that makes it, so that whatever bounds the
controller bounds its sandboxes too.
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
            if os.access(folder, os.W_OK) and _usable(kind, folder, name):
                found.setdefault(name, folder)
    return found


def enter(groups: Mapping[str, Path], plan: Plan) -> set[str]:
    """Make the sandbox's groups and move this process in; return the limits that hold."""
    held = set()
    for name, parent in groups.items():
        folder = parent / plan.id
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            unified = _is_unified(parent)
            for file, value in _limits(name, plan, unified=unified):
                (folder / file).write_text(value)
            # "0" is this process; a lone thread can move without a wait for the whole machine
            (folder / ("cgroup.procs" if unified else "tasks")).write_text("0")
            held.add(name)
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


def _usable(kind: str, folder: Path, name: str) -> bool:
    if kind == "cgroup":
        return True
    try:  # children get only the controllers that their parent hands down
        return name in (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _is_unified(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def _limits(name: str, plan: Plan, *, unified: bool) -> list[tuple[str, str]]:
    if name == "pids":
        return [("pids.max", str(plan.num_processes))]
    if name == "memory":
        size = str(plan.memory_mib << 20)
        if unified:
            return [("memory.max", size), ("memory.swap.max", "0")]
        return [("memory.limit_in_bytes", size)]
    quota = max(1000, int(plan.num_cpus * _PERIOD_US))
    if unified:
        return [("cpu.max", f"{quota} {_PERIOD_US}")]
    return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
