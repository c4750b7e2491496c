"""A Podman of one's own, in a temporary folder, with its API on a socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from .daemon import CannotRunError, Daemon, answers, launch, mounts, require

_SETTINGS = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


def start() -> Daemon:
    """Start it; its address is `unix:///…`. Raises CannotRunError."""
    require("podman", "conmon", "runc")
    if os.geteuid() != 0:
        message = "the test's Podman needs root"
        raise CannotRunError(message)
    folder = Path(tempfile.mkdtemp(prefix="services-podman-"))
    (folder / "containers.conf").write_text(_SETTINGS)
    path = folder / "podman.sock"
    try:
        process = launch(
            ["env", f"CONTAINERS_CONF={folder}/containers.conf", *_podman(folder), "system",
             "service", "-t", "0", f"unix://{path}"],
            folder, lambda: answers(path),
        )  # fmt: skip
    except CannotRunError:
        _clear(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Daemon(f"unix://{path}", process, folder, lambda: _clear(folder))


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
