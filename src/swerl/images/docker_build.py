"""Build the images of task folders from their Dockerfiles, with a Docker daemon.

A folder's image gets the name that its Task requires. Without a network, which is the default, a
Dockerfile can only copy and run files of its base image and of the folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swerl.core.errors import ImageError, InputError, TaskError
from swerl.core.task import Task
from swerl.tasks.datasets import find_converter
from swerl.tasks.task_folders import folder_row, folders

_NUM_LINES = 6
"""Lines quoted from the end of a failed build's log."""


class Network(StrEnum):
    """The network of a Dockerfile's steps."""

    NONE = "none"
    """No network."""
    DEFAULT = "default"
    """The daemon's default: usually the internet, for packages."""


@dataclass(frozen=True, slots=True)
class FolderImage:
    """One task folder: its image, or the error that stopped it."""

    folder: Path
    image: str = ""
    is_new: bool = False
    """True if it was built now; False if it existed."""
    error: TaskError | ImageError | None = None


def build_folders(
    root: Path, *, network: Network, say: Callable[[str], None] = lambda _: None
) -> Iterator[FolderImage]:
    """Build the missing images of the task folders under `root`, one by one.

    `say` gets each folder's name. Folders that name a published image are skipped. Raises
    InputError if no folder is a task, and ImageError if no daemon answers.
    """
    found = folders(root)
    if not found:
        raise InputError(
            f"{root} has no task folder",
            hint="name a folder that has `instruction.md` in it or below it",
        )
    _require_daemon()
    for folder in found:
        try:
            task = _task(folder)
            if "build" not in task.metadata:
                continue
            say(folder.name)
            is_new = _docker("image", "inspect", task.image).returncode != 0
            if is_new:
                _build(folder / "environment", task.image, network)
            yield FolderImage(folder, task.image, is_new)
        except (TaskError, ImageError) as error:
            yield FolderImage(folder, error=error)


def _task(folder: Path) -> Task:
    """Return the folder's Task, as `swerl convert` makes it."""
    row = folder_row(folder)
    if isinstance(row, TaskError):
        raise row
    is_harbor = (folder / "task.toml").is_file()
    return find_converter("harbor" if is_harbor else "open-instruct").to_task(row)


def _require_daemon() -> None:
    done = _docker("version", "--format", "{{.Server.Version}}")
    if done.returncode:
        raise ImageError(
            f"no Docker daemon is running: {_end(done.stderr, 1)}",
            hint="start dockerd, or set DOCKER_HOST; `swerl doctor` shows how",
        )


def _build(context: Path, image: str, network: Network) -> None:
    done = _docker("build", "--network", network, "--tag", image, str(context))
    if done.returncode:
        hint = "fix its environment/Dockerfile"
        if network is Network.NONE:
            hint = "if it fetches packages, allow that with --network default"
        raise ImageError(
            f"docker build failed:\n{_end(done.stdout + done.stderr, _NUM_LINES)}", hint=hint
        )


def _docker(*words: str) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = ("docker", *words)
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:
        raise ImageError(
            "the program `docker` is not installed",
            hint="install it, with a daemon; `swerl doctor` shows how",
        ) from (error)


def _end(text: str, num_lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-num_lines:])
