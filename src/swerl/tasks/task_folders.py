"""Read task folders (instruction, tests, environment) as rows with `task_id` and `files`.

A row has every file of the folder by its path, in the format of `core.task.file_text`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import file_text
from swerl.tasks.datasets import Row

INSTRUCTION = "instruction.md"
"""The file that marks a task folder."""
MAX_BYTES = 64 * 2**20
"""Maximum bytes of one task's files: its row and its Task are in memory."""
_MAX_DEPTH = 6
_PARTS = {INSTRUCTION, "task.toml", "image.txt", "setup.sh", "environment", "tests", "solution"}


def is_archive(path: Path) -> bool:
    """True if a file's name is that of an archive of task folders."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def folders(root: Path) -> list[Path]:
    """Return the task folders under a folder, or the folder itself, sorted by path."""
    if (root / INSTRUCTION).is_file():
        return [root]
    found = (path.parent for path in root.rglob(INSTRUCTION))
    return sorted(path for path in found if _is_visible(path.relative_to(root)))


def folder_row(folder: Path) -> Row | TaskError:
    files: dict[str, Json] = {}
    left = MAX_BYTES
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return TaskError(f"task {folder.name} has the link {name}")
        if path.is_file():
            left -= path.stat().st_size
            if left < 0:
                return _too_large(folder.name)
            files[name] = file_text(path.read_bytes())
    return {"task_id": folder.name, "files": files}


def archive_rows(stream: IO[bytes]) -> Iterator[Row | TaskError]:
    """Yield the rows of a tar archive, compressed or not, in one pass.

    A task's files must be adjacent, as `tar` writes them; otherwise the second part is an error.
    """
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            files = (member for member in archive if not member.isdir())
            for name, members in groupby(files, key=_task_of):
                if name in seen:
                    message = f"files of task {name} stand in two places; unpack the archive"
                    yield TaskError(message)
                elif name:
                    seen.add(name)
                    yield _member_row(archive, name, members)
    except (tarfile.TarError, EOFError, OSError) as error:
        yield TaskError(f"the archive is damaged or truncated: {error}")


def _member_row(
    archive: tarfile.TarFile, task: str, members: Iterator[tarfile.TarInfo]
) -> Row | TaskError:
    files: dict[str, Json] = {}
    left = MAX_BYTES
    problem: TaskError | None = None
    for member in members:
        parts = _parts(member)
        name = "/".join(parts[_root(parts) :])
        left -= member.size
        data = archive.extractfile(member) if member.isfile() else None
        if data is None:
            problem = TaskError(f"task {task} has {name}, which is not a regular file")
        elif left < 0:
            problem = _too_large(task)
        else:
            files[name] = file_text(data.read())
    return problem or {"task_id": task, "files": files}


def _too_large(task: str) -> TaskError:
    return TaskError(f"the files of task {task} have over {MAX_BYTES // 2**20} MiB")


def _task_of(member: tarfile.TarInfo) -> str:
    """Return the name of a file's task folder."""
    parts = _parts(member)
    root = _root(parts)
    return parts[root - 1] if root else ""


def _root(parts: tuple[str, ...]) -> int:
    """Return the index of the first path part that belongs inside a task."""
    return next((i for i, part in enumerate(parts) if part in _PARTS), len(parts) - 1)


def _parts(member: tarfile.TarInfo) -> tuple[str, ...]:
    parts = PurePosixPath(member.name.lstrip("/")).parts
    return tuple(part for part in parts if part not in {".", ".."})


def _is_visible(path: Path) -> bool:
    return len(path.parts) <= _MAX_DEPTH and not any(part.startswith(".") for part in path.parts)
