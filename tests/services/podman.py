"""A Podman of one's own, in a temporary folder, with its API on a socket."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from .daemon import Daemon, launch_on_socket, mounts, require, require_root

_SETTINGS = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


def start() -> Daemon:
    """Start it; its address is `unix:///…`. Raises CannotRunError."""
    require("podman", "conmon", "runc")
    require_root("the test's Podman")
    folder = Path(tempfile.mkdtemp(prefix="services-podman-"))
    (folder / "containers.conf").write_text(_SETTINGS)
    path = folder / "podman.sock"
    settings = ["env", f"CONTAINERS_CONF={folder}/containers.conf"]
    command = [*settings, *_podman(folder), "system", "service", "-t", "0", f"unix://{path}"]
    return launch_on_socket(command, folder, path, _clear)


def _podman(folder: Path) -> list[str]:
    folders = ["--root", f"{folder}/data", "--runroot", f"{folder}/run"]
    return ["podman", *folders, "--storage-driver", "overlay"]


def _clear(folder: Path) -> None:
    with suppress(OSError):
        subprocess.run(
            [*_podman(folder), "rm", "--all", "--force", "--time", "0"],
            capture_output=True, timeout=60,
        )  # fmt: skip
    for point in reversed(mounts(folder)):
        subprocess.run(["umount", "-l", point], stderr=subprocess.DEVNULL)
