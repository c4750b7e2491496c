"""A dataset's rows, one after the other: from JSONL and Parquet files, task folders, or the hub.

A source is read from any row on, so that a conversion that was broken off goes on; a line that is
no row comes as its error and counts as one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from swerl.core.errors import InputError, TaskError
from swerl.tasks import task_folders
from swerl.tasks._row_files import ENDINGS, HINT, Rows, count_rows, local, read_files
from swerl.tasks.datasets import Row

_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?")
_SPLITS = frozenset({"train", "test", "dev", "validation", "valid", "val"})


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows that can be read more than once."""

    name: str
    """Says where the rows are and which version of them; the same text means the same rows."""
    read: Callable[[int], Rows]
    """Yields the rows from this number on, counted from 0."""
    count: Callable[[], int | None]
    """Returns how many there are, where that is cheap to know."""
    files: frozenset[Path] = frozenset()
    """Files of this machine that are read, links resolved; nothing may be written over them."""


def listed(rows: Iterable[Row | TaskError]) -> RowSource:
    """Return rows at hand as a source."""
    kept = list(rows)
    return RowSource(f"{len(kept)} rows", lambda start: iter(kept[start:]), lambda: len(kept))


def file_rows(path: Path, *, split: str = "") -> RowSource:
    """Return the rows of a file, of all files in a folder, or of a folder or archive of tasks.

    With `split`, of the files in a folder that bear its name. Raises InputError where there is
    nothing to read.
    """
    if split and not path.is_dir():
        raise InputError(f"{path} is no folder, so that it has no splits", hint="leave --split out")
    if task_folders.is_archive(path):
        files = frozenset([path.resolve()])
        return RowSource(_version([path]), partial(_archive, path), lambda: None, files)
    if path.is_dir() and (found := task_folders.folders(path)):
        parts = [part for folder in found for part in sorted(folder.rglob("*"))]
        return RowSource(_version(parts), partial(_folders, found), lambda: len(found))
    paths = _row_files(path, split) if path.is_dir() else [path]
    opened = [local(each) for each in paths]
    files = frozenset(each.resolve() for each in paths)
    return RowSource(
        _version(paths), partial(read_files, opened), lambda: count_rows(opened), files
    )


def splits_in(path: Path) -> list[str]:
    """Return the splits that files of rows in a folder are named for, as the hub's are."""
    return sorted({split for each in _all_files(path) if (split := _split_of(each))})


def _row_files(folder: Path, split: str) -> list[Path]:
    paths = [each for each in _all_files(folder) if split in {"", _split_of(each)}]
    if not paths:
        message = f"folder {folder} holds no rows and no task folders"
        known = ", ".join(splits_in(folder))
        if split and known:
            raise InputError(
                f"folder {folder} has no split {split}", hint=f"pass --split with one of: {known}"
            )
        raise InputError(message, hint=HINT)
    return paths


def _all_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, without those of hidden folders."""
    found = (each for each in folder.rglob("*") if each.name.endswith(ENDINGS))
    return sorted(
        each
        for each in found
        if not any(part.startswith(".") for part in each.relative_to(folder).parts)
    )


def _split_of(path: Path) -> str:
    """Return the split that a file is named for: `test-00000-of-00005.parquet`, `test.jsonl`."""
    stem = path.name.split(".")[0]
    if match := _SHARD.fullmatch(stem):
        return match[1]
    return stem if stem in _SPLITS else ""


def _version(paths: list[Path]) -> str:
    """Return a text that says where files are and how they stand."""
    digest = hashlib.sha256()
    try:
        for path in paths:
            stat = path.stat() if path.exists() else path.lstat()
            digest.update(
                f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}\n".encode(
                    "utf-8", "surrogateescape"
                )
            )
    except OSError as error:
        raise InputError(
            f"cannot read rows from {paths[0]}: {error.strerror}", hint=HINT
        ) from error
    return f"{paths[0]} and {len(paths) - 1} more: {digest.hexdigest()}"


def _archive(path: Path, start: int) -> Rows:
    with path.open("rb") as stream:
        yield from islice(task_folders.archive_rows(stream), start, None)


def _folders(found: list[Path], start: int) -> Rows:
    return map(task_folders.folder_row, found[start:])
