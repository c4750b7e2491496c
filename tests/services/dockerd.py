"""A dockerd of one's own, in a temporary folder; nothing of the host's network is changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .daemon import CannotRunError, Daemon, answers, launch, mounts, require

_CGROUPS = Path("/sys/fs/cgroup")
_TRIES = 5


def start() -> Daemon:
    """Start it; its address is `unix:///…`. Raises CannotRunError."""
    require("dockerd", "containerd", "runc")
    if os.geteuid() != 0:
        raise CannotRunError("dockerd needs root")
    folder = Path(tempfile.mkdtemp(prefix="services-dockerd-"))
    path = folder / "docker.sock"
    (folder / "daemon.json").write_text(json.dumps({"runtimes": _runtimes()}))
    try:
        process = launch(_command(folder, path), folder, lambda: answers(path))
    except CannotRunError:
        _clear(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Daemon(f"unix://{path}", process, folder, lambda: _clear(folder))


def start_again(daemon: Daemon) -> Daemon:
    """Start one that has ended with its own folder and address. Raises CannotRunError.

    It is tried again, as service managers do: its containerd has 15 s, which is little on a busy
    machine.
    """
    path = daemon.folder / "docker.sock"
    for left in reversed(range(_TRIES)):
        try:
            process = launch(_command(daemon.folder, path), daemon.folder, lambda: answers(path))
            break
        except CannotRunError:
            if not left:
                raise
    return replace(daemon, process=process)


def _runtimes() -> dict[str, dict[str, object]]:
    """Return gVisor where it is installed; without KVM it traces its processes."""
    path = shutil.which("runsc")
    return (
        {"runsc": {"path": path, "runtimeArgs": ["--platform=ptrace", "--network=none"]}}
        if path
        else {}
    )


def _command(folder: Path, path: Path) -> list[str]:
    return [
        *("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
        *("--pidfile", f"{folder}/pid", "--host", f"unix://{path}"),
        *("--config-file", f"{folder}/daemon.json"),  # not the host's
        *("--bridge", "none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"),
        *("--storage-driver", "overlay2", "--cgroup-parent", f"/{folder.name}"),
        *("--shutdown-timeout", "2", "--log-level", "warn"),
    ]


def _clear(folder: Path) -> None:
    """Kill, unmount and remove what a dockerd that was killed leaves behind."""
    groups = [path for path in _CGROUPS.glob(f"**/{folder.name}") if path.is_dir()]
    for pid in (*_members(groups), *_helpers(folder)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for point in reversed(mounts(folder)):
        subprocess.run(["umount", "-l", point], stderr=subprocess.DEVNULL)
    for group in groups:
        _remove_group(group)


def _members(groups: list[Path]) -> set[int]:
    found: set[int] = set()
    for path in (file for group in groups for file in group.rglob("cgroup.procs")):
        with suppress(OSError):
            found.update(int(line) for line in path.read_text().split())
    return found - {0}


def _helpers(folder: Path) -> set[int]:
    """Return its containerd and shims: processes with the folder on their command line."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"containerd" in words[0] and any(os.fsencode(folder) in word for word in words):
                found.add(int(path.parent.name))
    return found


def _remove_group(group: Path) -> None:
    inner = [path for path in group.rglob("*") if path.is_dir()]
    for path in (*sorted(inner, reverse=True), group):
        for _ in range(100):  # a group takes a moment to notice that its last process died
            try:
                path.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.01)
            else:
                break
