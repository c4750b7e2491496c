"""Limits of one sandbox: memory, processes and CPU by cgroup, else by rlimit.

Cgroups are of version 1 or 2, if this user may create them. A sandbox's groups lie below the group
of the process that creates them, so the controller's own limits also bound its sandboxes. In
version 2 a group that contains processes cannot delegate its controllers. There the parent is the
nearest group above that delegates them and that this user may write.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._local.wire import SandboxPlan

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_SOCKET_PART = 8
"""Version 1 counts the memory of sockets apart, and allows them this part of `memory_mib`."""


def find(proc: Path = Path("/proc/self")) -> dict[str, Path]:
    """Return controller -> the cgroup in which this user may create a sandbox's group."""
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
        for name in _mounted_controllers(kind, options, paths):
            path = paths["" if kind == "cgroup2" else name]
            # The mount may show the hierarchy from a group below its root on.
            folder = Path(point, os.path.relpath(path, root))
            parent = _delegating(folder, name, Path(point)) if kind == "cgroup2" else folder
            if parent and os.access(parent, os.W_OK):
                found.setdefault(name, parent)
    return found


def enter(groups: Mapping[str, Path], plan: SandboxPlan) -> set[str]:
    """Create the sandbox's groups and move this process in; return the limits in force."""
    held = set()
    for parent in set(groups.values()):
        folder, unified = f"{parent}/{plan.id}", os.path.exists(f"{parent}/cgroup.controllers")
        names = [name for name in groups if groups[name] == parent]
        with suppress(OSError):
            with suppress(FileExistsError):
                os.mkdir(folder)
            set_ones = {name for name in names if _set_limit(folder, name, plan, unified=unified)}
            # "0" is this process. Version 1 moves a single thread without a machine-wide lock.
            kernel.write(f"{folder}/{'cgroup.procs' if unified else 'tasks'}", "0")
            held |= set_ones
    return held


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """The kernel's counters of a sandbox's memory group."""

    kills: int = 0
    """Processes killed for want of memory."""
    hits: int = 0
    """Times that the group's own limit was reached."""


def memory_counts(groups: Mapping[str, Path], name: str) -> MemoryCounts:
    """Read the counters of a sandbox's group; zeros if this kernel or user has none."""
    folder = f"{groups.get('memory', '/nonexistent')}/{name}"
    for files in (("memory.events",) * 2, ("memory.oom_control", "memory.failcnt")):
        with suppress(OSError, ValueError):  # an old kernel does not count kills
            kills, hits = (kernel.read(f"{folder}/{file}").split() for file in files)
            # The file of version 1 is a number alone.
            num_hits = hits[0] if len(hits) == 1 else hits[hits.index(b"oom") + 1]
            return MemoryCounts(int(kills[kills.index(b"oom_kill") + 1]), int(num_hits))
    return MemoryCounts()


def remove(groups: Mapping[str, Path], name: str) -> bool:
    """Remove the groups of a dead sandbox, else kill its rest; return whether all are gone.

    The kernel refuses as long as it still counts a process that has just died.
    """
    gone = True
    for parent in set(groups.values()):
        folder = f"{parent}/{name}"
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            gone = gone and error.errno != errno.EBUSY
            with suppress(OSError):
                _kill_group(folder)
    return gone


def leftovers(groups: Mapping[str, Path]) -> list[Path]:
    """Return the groups of all sandboxes here, dead or alive."""
    return [path for parent in set(groups.values()) for path in parent.glob("swerl-*-*")]


def limit_processes(plan: SandboxPlan, held: set[str]) -> None:
    """Set rlimits for what no cgroup limits, and suppress core dumps.

    A core limit of 1 byte writes no file, and the kernel skips a core_pattern that starts a program
    on the host. A limit of 0 would not skip it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    wanted = {resource.RLIMIT_FSIZE: plan.disk_mib << 20} if plan.scratch else {}
    if "memory" not in held:
        wanted[resource.RLIMIT_DATA] = plan.memory_mib << 20
    if "pids" not in held:
        wanted[resource.RLIMIT_NPROC] = plan.num_processes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        # An ordinary user cannot exceed its own hard limit.
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _mounted_controllers(kind: str, options: str, paths: Mapping[str, str]) -> tuple[str, ...]:
    if kind == "cgroup2":
        return _CONTROLLERS if "" in paths else ()
    listed = options.split()[-1].split(",")
    return tuple(name for name in _CONTROLLERS if name in listed and name in paths)


def _delegating(folder: Path, name: str, point: Path) -> Path | None:
    """Return the nearest group at or above `folder` that delegates this controller.

    To move a process between groups, a user needs write access to `cgroup.procs` of their nearest
    common ancestor, which is the group returned.
    """
    for parent in (folder, *folder.parents):
        if not parent.is_relative_to(point):
            break
        with suppress(OSError):
            controllers = (parent / "cgroup.subtree_control").read_text().split()
            if name in controllers and os.access(parent / "cgroup.procs", os.W_OK):
                return parent
    return None


def _set_limit(folder: str, name: str, plan: SandboxPlan, *, unified: bool) -> bool:
    """Write one limit; return whether it is in force."""
    try:
        for file, value in _limit_files(name, plan, unified=unified):
            kernel.write(f"{folder}/{file}", value)
    except OSError:
        return False
    if name == "memory":
        # A kernel that does not count swap, or version 1 sockets, has no such file.
        with suppress(OSError):
            if unified:
                kernel.write(f"{folder}/memory.swap.max", "0")
            else:
                sockets = (plan.memory_mib << 20) // _SOCKET_PART
                kernel.write(f"{folder}/memory.kmem.tcp.limit_in_bytes", str(sockets))
    return True


def _limit_files(name: str, plan: SandboxPlan, *, unified: bool) -> list[tuple[str, str]]:
    if name == "pids":
        return [("pids.max", str(plan.num_processes))]
    if name == "memory":
        size = str(plan.memory_mib << 20)
        return [("memory.max", size)] if unified else [("memory.limit_in_bytes", size)]
    quota = max(1000, int(plan.num_cpus * _PERIOD_US))
    if unified:
        return [("cpu.max", f"{quota} {_PERIOD_US}")]
    return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]


def _kill_group(folder: str) -> None:
    killer = f"{folder}/cgroup.kill"
    if os.path.exists(killer):
        kernel.write(killer, "1")
        return
    for pid in map(int, Path(folder, "cgroup.procs").read_text().split()):
        if pid:  # 0 is a process that this one cannot see
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
