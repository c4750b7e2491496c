"""Read a dataset's rows from JSONL files (plain, gzip, zstd), JSON lists, Parquet or task folders.

A source can be read from any row on, so an interrupted conversion resumes, in bounded memory. A
line that is not a row is yielded as its error and counts as one row.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import orjson

from swerl.core.errors import InputError, TaskError
from swerl.tasks import task_folders
from swerl.tasks.datasets import Row

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Rows: TypeAlias = Iterator[Row | TaskError]

HINT = "pass --rows with a JSONL or Parquet file, or a folder of them"
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Endings of files with rows in a folder."""
_OTHERS = {".csv", ".tsv", ".arrow", ".feather", ".pkl", ".pickle", ".xlsx", ".db", ".sqlite"}
"""Endings of tables in unsupported formats."""
_PARQUET_ROWS = 32
"""Rows in memory from a Parquet file: the largest known rows have one megabyte."""
_GROUP_BYTES = 8 << 20
"""Maximum size of a remote row group that is fetched at once; larger ones go by column."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """One file; its name gives the format."""

    name: str
    open: Callable[[], IO[bytes]]
    is_remote: bool = False

    @property
    def is_parquet(self) -> bool:
        """True if it is a table, not lines."""
        return self.name.endswith(".parquet")


def local(path: Path) -> RowFile:
    """Return a local file. Raises InputError on an unsupported format."""
    if path.suffix.lower() in _OTHERS:
        raise InputError(
            f"cannot read rows from {path}: it is neither JSONL nor Parquet",
            hint="convert it with `Dataset.to_parquet` of the package datasets",
        )
    return RowFile(str(path), lambda: path.open("rb", CHUNK_BYTES))


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
            yield from map(parse, lines)


def count_rows(files: Sequence[RowFile]) -> int | None:
    """Return the number of rows of local files, with blank lines, if that is cheap."""
    num_rows = 0
    for file in files:
        more = _parquet(file).metadata.num_rows if file.is_parquet else count_lines(file.open)
        if more is None:
            return None
        num_rows += more
    return num_rows


def _lines(file: RowFile) -> Iterator[bytes]:
    try:
        yield from file_lines(file.open)
    except (OSError, InputError) as error:
        raise _unreadable(file, error) from error


def _parquet(file: RowFile, *, in_one_piece: bool = False) -> ParquetFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "reading Parquet needs the package `pyarrow`",
            hint="install it: `pip install 'swerl[datasets]'`",
        ) from error
    try:
        source = file.open() if file.is_remote else file.name
        return pyarrow.parquet.ParquetFile(source, pre_buffer=in_one_piece, buffer_size=CHUNK_BYTES)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, _unfetched(file) or error) from error


def _unfetched(file: RowFile) -> InputError | None:
    """Return the reason why a local file is only a pointer, if it is one."""
    try:
        with file.open() as stream:
            check_fetched(stream.readline())
    except InputError as error:
        return error
    except OSError:
        return None
    return None


def _parquet_rows(file: RowFile, start: int) -> Rows:
    import pyarrow

    facts = _parquet(file).metadata
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    small = file.is_remote and max(group.total_byte_size for group in groups) <= _GROUP_BYTES
    table = _parquet(file, in_one_piece=small)
    try:
        for number, group in enumerate(groups):
            if start < group.num_rows:
                # Group by group: a single fetch covers all requested groups.
                batches = table.iter_batches(_PARQUET_ROWS, row_groups=[number])
                found = map(_batch_rows, map(_as_text, batches))
                yield from islice(chain.from_iterable(found), start, None)
            start = max(0, start - group.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _as_text(batch: Any) -> Any:
    """Return a batch with byte columns as text: some writers do not mark text."""
    for number, field in enumerate(batch.schema):
        kind = _text_kind(field.type)
        if kind != field.type:
            # Invalid UTF-8 is found later, row by row.
            values = batch.column(number).cast(kind, safe=False)
            batch = batch.set_column(number, field.name, values)
    return batch


def _text_kind(kind: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_list(kind):
        inner = _text_kind(kind.value_type)
        return kind if inner == kind.value_type else pyarrow.list_(inner)
    texts = {pyarrow.binary(): pyarrow.string(), pyarrow.large_binary(): pyarrow.large_string()}
    return texts.get(kind, kind)


def _batch_rows(batch: Any) -> list[Row | TaskError]:
    try:
        rows: list[Row | TaskError] = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [TaskError("the row has text that is not UTF-8")]
        halves = (batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2))
        rows = [row for half in halves for row in _batch_rows(half)]
    return rows


def _unreadable(file: RowFile, error: Exception) -> InputError:
    said = getattr(error, "strerror", "") or str(error)
    message = f"cannot read rows from {file.name}: {said.strip():.200}"
    return InputError(message, hint=getattr(error, "hint", "") or HINT)


_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?")
_SPLITS = frozenset({"train", "test", "dev", "validation", "valid", "val"})


@dataclass(frozen=True, slots=True)
class RowSource:
    """A source of rows that can be read again."""

    name: str
    """Location and version of the rows; the same text means the same rows."""
    read: Callable[[int], Rows]
    """Yields the rows from this index on."""
    count: Callable[[], int | None]
    """Returns the number of rows if that is cheap."""
    files: frozenset[Path] = frozenset()
    """Local input files, with links resolved; they are never overwritten."""


def listed(rows: Iterable[Row | TaskError]) -> RowSource:
    kept = list(rows)
    return RowSource(f"{len(kept)} rows", lambda start: iter(kept[start:]), lambda: len(kept))


def file_rows(path: Path, *, split: str = "") -> RowSource:
    """Return the rows of a file, of all files in a folder, or of a folder or archive of tasks.

    With `split`: of the files in a folder with its name. Raises InputError if there is nothing to
    read.
    """
    if not path.exists():
        raise InputError(f"cannot read rows from {path}: it does not exist", hint="check --rows")
    if split and not path.is_dir():
        raise InputError(f"{path} is not a folder, so it has no splits", hint="remove --split")
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
    """Return the splits in the names of a folder's files, by the hub's rule."""
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
    """Return the files with rows in a folder, without hidden folders."""
    found = (each for each in folder.rglob("*") if each.name.endswith(ENDINGS))
    return sorted(
        each
        for each in found
        if not any(part.startswith(".") for part in each.relative_to(folder).parts)
    )


def _split_of(path: Path) -> str:
    """Return the split in a file's name: `test-00000-of-00005.parquet`, `test.jsonl`."""
    stem = path.name.split(".")[0]
    if match := _SHARD.fullmatch(stem):
        return match[1]
    return stem if stem in _SPLITS else ""


def _version(paths: list[Path]) -> str:
    """Return location, size and time of files as one text."""
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


CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of a Git LFS pointer file."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_NOT_JSON = (b"NaN", b"Infinity")
"""Numbers that Python's `json` writes but JSON does not have."""


def file_lines(opened: Callable[[], IO[bytes]]) -> Iterator[bytes]:
    """Yield a file's non-blank lines, or a list's entries. Raises OSError, InputError."""
    with _plain_lines(opened) as lines:
        first = next(lines, b"")
        if first.startswith(b"["):
            yield from map(orjson.dumps, _listed(b"".join([first, *lines])))
        elif first:
            yield first
            yield from lines


def parse(line: bytes) -> Row | TaskError:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if (row := _lenient(line)) is None:
            return TaskError(f"the line is not JSON: {error.msg}")
    return row if isinstance(row, dict) else TaskError("the line is not a JSON object")


def count_lines(opened: Callable[[], IO[bytes]]) -> int | None:
    """Return the number of lines, with blank ones, or None if only reading shows it."""
    with opened() as stream:
        head = stream.read(len(_ZSTD))
        if head.startswith((_GZIP, _ZSTD, b"[")):
            return None
        chunks = chain([head], iter(partial(stream.read, CHUNK_BYTES), b""))
        return sum(chunk.count(b"\n") for chunk in chunks)


def check_fetched(head: bytes) -> None:
    """Raise InputError if the file is a Git LFS pointer."""
    if head.startswith(_LFS):
        raise InputError(
            "it is only a Git LFS pointer",
            hint="fetch the file itself: `git lfs pull`",
        )


@contextmanager
def _plain_lines(opened: Callable[[], IO[bytes]]) -> Iterator[Iterator[bytes]]:
    """Yield the non-blank lines of a file, decompressed."""
    with opened() as stream:
        first = stream.readline()
        if not first.startswith((_GZIP, _ZSTD)):
            yield _kept(first, stream)
            return
    with opened() as packed, _unpacked(packed, first) as stream:
        try:
            yield _kept(stream.readline(), stream)
        except (EOFError, zlib.error) as error:
            raise OSError(f"it is damaged or truncated: {error}") from error


def _kept(first: bytes, stream: Iterable[bytes]) -> Iterator[bytes]:
    check_fetched(first)
    lines = chain([first.removeprefix(_BOM)], stream)
    return (line for line in lines if line and not line.isspace())


def _unpacked(packed: IO[bytes], head: bytes) -> IO[bytes] | gzip.GzipFile:
    if head.startswith(_GZIP):
        return gzip.open(packed)
    try:
        import pyarrow
    except ImportError as error:
        message = "reading zstd's files needs the package `pyarrow`"
        hint = "unpack it with `unzstd`, or `pip install 'swerl[datasets]'`"
        raise InputError(message, hint=hint) from error
    return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"), CHUNK_BYTES)


def _listed(text: bytes) -> list[object]:
    """Return the entries of a file that is one JSON list."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if (found := _lenient(text)) is None:
            raise OSError(f"it is not a JSON list: {error.msg}") from error
    return list(found)


def _lenient(text: bytes) -> Any:
    """Return JSON with null for numbers that JSON does not have; None if that does not help."""
    if not any(name in text for name in _NOT_JSON):
        return None
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
