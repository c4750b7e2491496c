"""A dataset's rows, one after the other: from JSONL and Parquet files, task folders, or the hub.

A source is read from any row on, so that a conversion that was broken off goes on; a line that is
no row comes as its error and counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import orjson

from swerl.errors import InputError, TaskError
from swerl.tasks import task_folders
from swerl.tasks.datasets import Row

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Rows: TypeAlias = Iterator[Row | TaskError]

_PARQUET_ROWS = 64
"""Rows held at once from a Parquet file: the largest known rows have one megabyte."""
_CHUNK_BYTES = 1 << 20
_FILE_HINT = "pass --rows with a JSONL or Parquet file, or a folder of them"


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows that can be read more than once."""

    name: str
    """Says where the rows are and which version of them; the same text means the same rows."""
    read: Callable[[int], Rows]
    """Yields the rows from this number on, counted from 0."""
    count: Callable[[], int | None]
    """Returns how many there are, where that is cheap to know."""


def listed(rows: Iterable[Row | TaskError]) -> RowSource:
    """Return rows at hand as a source."""
    kept = list(rows)
    return RowSource(f"{len(kept)} rows", lambda start: iter(kept[start:]), lambda: len(kept))


def file_rows(path: Path) -> RowSource:
    """Return the rows of a file, of all files in a folder, or of a folder or archive of tasks.

    Raises InputError where there is nothing to read.
    """
    if task_folders.is_archive(path):
        return RowSource(_version([path]), partial(_archive, path), lambda: None)
    if path.is_dir() and (found := task_folders.folders(path)):
        return RowSource(_version(found), partial(_folders, found), lambda: len(found))
    files = sorted(_row_files(path)) if path.is_dir() else [path]
    if not files:
        message = f"folder {path} holds no rows and no task folders"
        raise InputError(message, hint=_FILE_HINT)
    return RowSource(_version(files), partial(_files, files), lambda: _count(files))


def stream_rows(stream: IO[bytes], name: str) -> Rows:
    """Yield the rows of an open file, read by what its name ends with."""
    if task_folders.is_archive(Path(name)):
        return task_folders.archive_rows(stream)
    return (_parse(line) for line in stream if not line.isspace())


def _row_files(folder: Path) -> Iterator[Path]:
    return chain(folder.rglob("*.jsonl"), folder.rglob("*.parquet"))


def _version(paths: list[Path]) -> str:
    try:
        stats = [(path.resolve(), path.stat()) for path in paths]
    except OSError as error:
        message = f"cannot read rows from {paths[0]}: {error.strerror}"
        raise InputError(message, hint=_FILE_HINT) from error
    return " ".join(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats)


def _archive(path: Path, start: int) -> Rows:
    with path.open("rb") as stream:
        yield from islice(task_folders.archive_rows(stream), start, None)


def _folders(found: list[Path], start: int) -> Rows:
    return map(task_folders.folder_row, found[start:])


def _files(paths: list[Path], start: int) -> Rows:
    for path in paths:
        if path.suffix == ".parquet":
            size = _parquet(path).metadata.num_rows
            if start < size:
                yield from _parquet_rows(path, start)
            start = max(0, start - size)
        else:
            lines = _lines(path)
            skipped = sum(1 for _ in islice(lines, start)) if start else 0
            start -= skipped
            yield from map(_parse, lines)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=_CHUNK_BYTES) as stream:
            yield from (line for line in stream if not line.isspace())
    except OSError as error:
        message = f"cannot read rows from {path}: {error.strerror}"
        raise InputError(message, hint=_FILE_HINT) from error


def _parse(line: bytes) -> Row | TaskError:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return TaskError(f"the line is no JSON: {error.msg}")
    return row if isinstance(row, dict) else TaskError("the line is no JSON object")


def _count(paths: list[Path]) -> int:
    return sum(
        _parquet(path).metadata.num_rows if path.suffix == ".parquet" else _count_lines(path)
        for path in paths
    )


def _count_lines(path: Path) -> int:
    with path.open("rb", buffering=0) as stream:
        return sum(chunk.count(b"\n") for chunk in iter(partial(stream.read, _CHUNK_BYTES), b""))


def _parquet(path: Path) -> ParquetFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        message = "reading Parquet needs the package `pyarrow`"
        raise InputError(message, hint="install it: `pip install 'swerl[datasets]'`") from error
    try:
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_CHUNK_BYTES)
    except (OSError, pyarrow.ArrowException) as error:
        message = f"cannot read rows from {path}: {error}"
        raise InputError(message, hint=_FILE_HINT) from error


def _parquet_rows(path: Path, start: int) -> Rows:
    import pyarrow

    file = _parquet(path)
    groups = list(range(file.metadata.num_row_groups))
    while groups and start >= (size := file.metadata.row_group(groups[0]).num_rows):
        start -= size
        del groups[0]
    try:
        batches = file.iter_batches(_PARQUET_ROWS, row_groups=groups)
        yield from islice(chain.from_iterable(map(_batch_rows, batches)), start, None)
    except (OSError, pyarrow.ArrowException) as error:
        message = f"cannot read rows from {path}: {error}"
        raise InputError(message, hint="the file is damaged; fetch it again") from error


def _batch_rows(batch: Any) -> list[Row | TaskError]:
    try:
        rows: list[Row | TaskError] = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [TaskError("the row holds text that is not UTF-8")]
        halves = (batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2))
        rows = [row for half in halves for row in _batch_rows(half)]
    return rows
