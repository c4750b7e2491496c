"""Files of rows: JSONL and Parquet, here or on the hub, read from any row on in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import orjson

from swerl.errors import InputError, TaskError
from swerl.tasks.datasets import Row

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Rows: TypeAlias = Iterator[Row | TaskError]

HINT = "pass --rows with a JSONL or Parquet file, or a folder of them"
_PARQUET_ROWS = 32
"""Rows held at once from a Parquet file: the largest known rows have one megabyte."""
_CHUNK_BYTES = 1 << 20
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""How gzip's and zstd's files begin."""
_GROUP_BYTES = 8 << 20
"""Most bytes of a remote row group that is fetched in one piece and not column by column."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """One file; its name says how it is read."""

    name: str
    open: Callable[[], IO[bytes]]
    is_remote: bool = False

    @property
    def is_parquet(self) -> bool:
        """Whether it is a table and not lines."""
        return self.name.endswith(".parquet")


def local(path: Path) -> RowFile:
    """Return a file of this machine."""
    return RowFile(str(path), lambda: path.open("rb", _CHUNK_BYTES))


def read_files(files: Sequence[RowFile], start: int) -> Rows:
    """Yield the rows of all files from this number on. Raises InputError on a damaged file."""
    for file in files:
        if file.is_parquet:
            size = _parquet(file).metadata.num_rows
            if start < size:
                yield from _parquet_rows(file, start)
            start = max(0, start - size)
        else:
            lines = _lines(file)
            start -= sum(1 for _ in islice(lines, start)) if start else 0
            yield from map(_parse, lines)


def count_rows(files: Sequence[RowFile]) -> int:
    """Return how many rows files of this machine have; blank lines count."""
    return sum(
        _parquet(file).metadata.num_rows if file.is_parquet else _count_lines(file)
        for file in files
    )


def _lines(file: RowFile) -> Iterator[bytes]:
    try:
        with file.open() as stream:
            first = stream.readline()
            if first.startswith(_COMPRESSED):
                message = f"cannot read rows from {file.name}: it is compressed"
                raise InputError(message, hint="unpack it with gunzip or unzstd")
            yield from (line for line in chain([first], stream) if line and not line.isspace())
    except OSError as error:
        raise _unreadable(file, error) from error


def _parse(line: bytes) -> Row | TaskError:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return TaskError(f"the line is no JSON: {error.msg}")
    return row if isinstance(row, dict) else TaskError("the line is no JSON object")


def _count_lines(file: RowFile) -> int:
    with file.open() as stream:
        return sum(chunk.count(b"\n") for chunk in iter(partial(stream.read, _CHUNK_BYTES), b""))


def _parquet(file: RowFile, *, in_one_piece: bool = False) -> ParquetFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        message = "reading Parquet needs the package `pyarrow`"
        raise InputError(message, hint="install it: `pip install 'swerl[datasets]'`") from error
    try:
        source = file.open() if file.is_remote else file.name
        return pyarrow.parquet.ParquetFile(
            source, pre_buffer=in_one_piece, buffer_size=_CHUNK_BYTES
        )
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _parquet_rows(file: RowFile, start: int) -> Rows:
    import pyarrow

    facts = _parquet(file).metadata
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    small = file.is_remote and max(group.total_byte_size for group in groups) <= _GROUP_BYTES
    table = _parquet(file, in_one_piece=small)
    try:
        for number, group in enumerate(groups):
            if start < group.num_rows:
                # Group by group: what is fetched in one piece is fetched for all that are asked.
                batches = table.iter_batches(_PARQUET_ROWS, row_groups=[number])
                yield from islice(chain.from_iterable(map(_batch_rows, batches)), start, None)
            start = max(0, start - group.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _batch_rows(batch: Any) -> list[Row | TaskError]:
    try:
        rows: list[Row | TaskError] = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [TaskError("the row holds text that is not UTF-8")]
        halves = (batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2))
        rows = [row for half in halves for row in _batch_rows(half)]
    return rows


def _unreadable(file: RowFile, error: Exception) -> InputError:
    said = getattr(error, "strerror", "") or str(error)
    message = f"cannot read rows from {file.name}: {said.strip():.200}"
    return InputError(message, hint=HINT)
