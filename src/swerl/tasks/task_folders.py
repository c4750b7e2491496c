"""Read task folders (instruction, tests, environment) as rows with `task_id` and `files`.

A row has every file of the folder by its path, in the format of `core.task.file_text`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.files import unpack_tarball
from swerl.core.task import file_text
from swerl.tasks.datasets import Row

INSTRUCTION = "instruction.md"
"""The file that marks a task folder."""
ARCHIVES = (".tar.gz", ".tgz", ".tar")
"""Endings of archives of task folders."""
MAX_BYTES = 64 * 2**20
"""Maximum bytes of one task's files: its row and its Task are in memory."""
_MAX_DEPTH = 6


def folders(root: Path) -> list[Path]:
    """Return the task folders under a folder, or the folder itself, sorted by path."""
    if (root / INSTRUCTION).is_file():
        return [root]
    parents = (path.parent for path in root.rglob(INSTRUCTION))
    return sorted(path for path in parents if _is_visible(path.relative_to(root)))


def folder_row(folder: Path) -> Row | TaskError:
    """Return the row of a task folder, or its error if it has links or too large files."""
    files: dict[str, Json] = {}
    num_bytes = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return TaskError(f"task {folder.name} has the link {name}")
        if path.is_file():
            num_bytes += path.stat().st_size
            if num_bytes > MAX_BYTES:
                message = f"the files of task {folder.name} have over {MAX_BYTES // 2**20} MiB"
                return TaskError(message)
            files[name] = file_text(path.read_bytes())
    return {"task_id": folder.name, "files": files}


def archive_rows(path: Path) -> Iterator[Row | TaskError]:
    """Unpack a tar archive into a temporary folder and yield the rows of its task folders.

    Raises ValueError if the archive is damaged.
    """
    with TemporaryDirectory() as folder:
        unpack_tarball(path, Path(folder))
        yield from map(folder_row, folders(Path(folder)))


def _is_visible(path: Path) -> bool:
    return len(path.parts) <= _MAX_DEPTH and not any(part.startswith(".") for part in path.parts)
