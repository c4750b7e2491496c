"""Read a dataset's rows: JSONL (plain, gzip, zstd), a JSON list, Parquet, task folders, or the hub.

Files are streamed in bounded memory; a JSON list is held in memory. A line that is not a row is
yielded as its error and counts as one row. Parquet is read by pyarrow, the hub by `datasets`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeAlias

import orjson

from swerl.core.errors import InputError, TaskError, install_command
from swerl.tasks import task_folders
from swerl.tasks.datasets import Row

Rows: TypeAlias = Iterator[Row | TaskError]

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", *task_folders.ARCHIVES)
"""Endings of the files that are read in a folder."""
_OTHER_TABLES = {".csv", ".tsv", ".arrow", ".feather", ".pkl", ".xlsx", ".db", ".sqlite"}
_HINT = "pass --rows with a JSONL or Parquet file, or a folder of them"
_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 32
"""Rows in memory from a Parquet file: the largest known rows have one megabyte."""
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?")
_SPLITS = frozenset({"train", "test", "dev", "validation", "valid", "val"})
_BOM = b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of a Git LFS pointer, which stands in for a file that was not fetched."""
_NOT_JSON = (b"NaN", b"Infinity")
"""Numbers that Python's `json` writes but JSON does not have."""


def file_rows(path: Path, *, split: str = "") -> Rows:
    """Return the rows of a file, of all files in a folder, or of a folder or archive of tasks.

    With `split`, only files of that split are read. Raises InputError if there is nothing to read,
    or if a file is damaged or of another format.
    """
    if path.is_dir() and not split and (folders := task_folders.folders(path)):
        return map(task_folders.folder_row, folders)
    return chain.from_iterable(map(_read, _row_files(path, split)))


def hub_rows(repo_id: str, split: str = "", *, files: str = "") -> Rows:
    """Stream the rows of a split from the Hugging Face hub, at one commit.

    With `files`, the files that match this pattern are downloaded into the hub's cache and read one
    by one. Raises InputError if the hub does not have them or the extra is not installed.
    """
    with _hub_errors(repo_id):
        if not files:
            from datasets import load_dataset

            yield from load_dataset(repo_id, split=split, streaming=True)
            return
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repo_id, repo_type="dataset", allow_patterns=files))
    if not _files_in(folder):
        message = f"{repo_id} has no file {files}"
        raise InputError(message, hint="pass another --repo-id, or --rows FILE")
    yield from file_rows(folder)


def splits_in(folder: Path) -> list[str]:
    """Return the splits in the names of a folder's files, by the hub's rule."""
    return sorted({split for file in _files_in(folder) if (split := _split_of(file))})


def _row_files(path: Path, split: str) -> list[Path]:
    """Return the files that hold the rows. Raises InputError if there are none."""
    if not path.exists():
        raise InputError(f"cannot read rows from {path}: it does not exist", hint="check --rows")
    if path.is_file():
        if split:
            raise InputError(f"{path} is not a folder, so it has no splits", hint="remove --split")
        return [path]
    files = [file for file in _files_in(path) if split in {"", _split_of(file)}]
    if not files and split and (splits := ", ".join(splits_in(path))):
        raise InputError(
            f"folder {path} has no split {split}", hint=f"pass --split with one of: {splits}"
        )
    if not files:
        raise InputError(f"folder {path} has no rows and no task folders", hint=_HINT)
    return files


def _files_in(folder: Path) -> list[Path]:
    """Return the files with rows in a folder, without hidden folders."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.name.endswith(ENDINGS)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _split_of(path: Path) -> str:
    """Return the split in a file's name: `test-00000-of-00005.parquet`, `test.jsonl`."""
    stem = path.name.split(".")[0]
    if match := _SHARD.fullmatch(stem):
        return match[1]
    return stem if stem in _SPLITS else ""


def _read(path: Path) -> Rows:
    """Yield the rows of one file; its name gives the format."""
    if path.suffix.lower() in _OTHER_TABLES:
        raise InputError(
            f"cannot read rows from {path}: it is neither JSONL nor Parquet",
            hint="convert it with `Dataset.to_parquet` of the package datasets",
        )
    try:
        if _is_lfs_pointer(path):
            raise InputError(
                f"cannot read rows from {path}: it is only a Git LFS pointer",
                hint="fetch the file itself: `git lfs pull`",
            )
        if path.name.endswith(task_folders.ARCHIVES):
            yield from task_folders.archive_rows(path)
        elif path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            yield from map(_parse, _lines(path))
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read rows from {path}: {reason:.200}", hint=_HINT) from error


def _parquet_rows(path: Path) -> Rows:
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(path).iter_batches(_PARQUET_ROWS):
        for number in range(batch.num_rows):
            try:
                # Row by row, so that text that is not UTF-8 rejects its own row only.
                (row,) = batch.slice(number, 1).to_pylist()
                yield {name: _as_text(value) for name, value in row.items()}
            except UnicodeDecodeError:
                yield TaskError("the row has text that is not UTF-8")


def _as_text(value: Any) -> Any:
    """Return bytes as text: some writers of Parquet do not mark text."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def _lines(path: Path) -> Iterator[bytes]:
    """Yield a file's non-blank lines, or the entries of a JSON list."""
    with _opened(path) as stream:
        lines = (line for line in stream if not line.isspace())
        first = next(lines, b"").removeprefix(_BOM)
        if first.startswith(b"["):
            yield from map(orjson.dumps, _json_list(b"".join([first, *lines])))
        elif first:
            yield from chain([first], lines)


def _opened(path: Path) -> IO[bytes]:
    if path.suffix not in {".gz", ".zst"}:
        return path.open("rb", _CHUNK_BYTES)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path)), _CHUNK_BYTES)


def _parse(line: bytes) -> Row | TaskError:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if (row := _lenient(line)) is None:
            return TaskError(f"the line is not JSON: {error.msg}")
    return row if isinstance(row, dict) else TaskError("the line is not a JSON object")


def _json_list(text: bytes) -> list[object]:
    try:
        return list(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        if (entries := _lenient(text)) is None:
            raise ValueError(f"it is not a JSON list: {error.msg}") from error
        return list(entries)


def _lenient(text: bytes) -> Any:
    """Return JSON with null for numbers that JSON does not have; None if that does not help."""
    if not any(name in text for name in _NOT_JSON):
        return None
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turn the client libraries' errors into an InputError."""
    try:
        yield
    except ImportError as error:
        raise InputError(
            "reading from the hub needs the packages `datasets` and `huggingface-hub`",
            hint=f"{install_command('datasets')}, or read the rows of a file",
        ) from error
    except Exception as error:  # three client libraries without a common base class
        first_line = str(error).strip().split("\n")[0]
        raise InputError(
            f"cannot read {repo_id} from the hub: {first_line:.200}",
            hint="check id, split and network, or read the rows of a file with --rows",
        ) from error
