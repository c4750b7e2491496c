"""The task file that a command is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swerl.core.task import Task


def tasks_in(path: Path) -> list[Task]:
    """Return a file's Tasks. Raises TaskError where it cannot be read or holds none."""
    from swerl.core.errors import TaskError
    from swerl.core.task import read_tasks

    if found := list(read_tasks(path)):
        return found
    raise TaskError(f"{path} holds no task", hint="`swerl convert` says why rows were rejected")
