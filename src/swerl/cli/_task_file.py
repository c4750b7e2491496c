"""The task file that a command is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swerl.task import Task


def tasks_in(path: Path) -> list[Task]:
    """Return a file's Tasks. Raises TaskError where it cannot be read or holds none."""
    from swerl.errors import TaskError
    from swerl.task import read_tasks

    if found := list(read_tasks(path)):
        return found
    message = f"{path} holds no task"
    raise TaskError(message, hint="`swerl convert` says why rows were rejected")
