"""Stream rows from the Hugging Face hub without storing them, at one pinned commit.

`datasets` lists the files of a split. Parquet and JSONL files are then read by range in bounded
memory; `datasets` itself streams other formats.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import IO

from swerl.core.errors import InputError
from swerl.tasks import task_folders
from swerl.tasks.rows import RowFile, Rows, RowSource, read_files

_HINT = "check id, split and network, or read the rows of a file; the same command resumes"
_READ = (".parquet", ".jsonl")


def hub_rows(repo_id: str, split: str) -> RowSource:
    """Return the rows of one split. Raises InputError if the hub does not have it."""
    what = f"{repo_id} ({split})"
    with _reported(what):
        commit = _commit(repo_id)
        urls = _split_files(repo_id, split, commit)
    if all(url.endswith(_READ) for url in urls):
        read = partial(_reported_rows, what, partial(read_files, [_file(url) for url in urls]))
    else:
        read = partial(_reported_rows, what, partial(_streamed, repo_id, split, commit))
    return RowSource(f"{repo_id}@{commit} {split}", read, lambda: None)


def hub_file_rows(repo_id: str, pattern: str) -> RowSource:
    """Return the rows of the files that match the pattern, file by file."""
    with _reported(repo_id):
        from huggingface_hub import HfApi

        commit = _commit(repo_id)
        paths = HfApi().list_repo_files(repo_id, repo_type="dataset", revision=commit)
    found = sorted(fnmatch.filter(paths, pattern))
    if not found:
        raise InputError(
            f"{repo_id} has no file {pattern}", hint="pass another --repo-id, or --rows FILE"
        )
    files = [_file(f"hf://datasets/{repo_id}@{commit}/{path}") for path in found]
    is_table = all(file.name.endswith(_READ) for file in files)
    rows = partial(read_files, files) if is_table else partial(_archives, files)
    read = partial(_reported_rows, repo_id, rows)
    return RowSource(f"{repo_id}@{commit} {pattern}", read, lambda: None)


def _commit(repo_id: str) -> str:
    from huggingface_hub import HfApi

    return HfApi().dataset_info(repo_id).sha or "main"


def _split_files(repo_id: str, split: str, commit: str) -> list[str]:
    from datasets import load_dataset_builder

    found = load_dataset_builder(repo_id, revision=commit).config.data_files or {}
    if split not in found:
        known = ", ".join(map(str, found))
        raise InputError(
            f"{repo_id} has no split {split}", hint=f"pass --split with one of: {known}"
        )
    return [str(url) for url in found[split]]


def _file(url: str) -> RowFile:
    def opened() -> IO[bytes]:
        from huggingface_hub import HfFileSystem

        # Parquet's reader requests single ranges; lines are read ahead.
        cache = "none" if url.endswith(".parquet") else "readahead"
        stream: IO[bytes] = HfFileSystem().open(url.removeprefix("hf://"), "rb", cache_type=cache)
        return stream

    return RowFile(url, opened, is_remote=True)


def _archives(files: Iterable[RowFile], start: int) -> Rows:
    return islice(chain.from_iterable(map(_archive, files)), start, None)


def _archive(file: RowFile) -> Rows:
    with file.open() as stream:
        yield from task_folders.archive_rows(stream)


def _streamed(repo_id: str, split: str, commit: str, start: int) -> Rows:
    from datasets import load_dataset

    rows = load_dataset(repo_id, split=split, streaming=True, revision=commit)
    yield from rows.skip(start) if start else rows


def _reported_rows(what: str, read: partial[Rows], start: int) -> Rows:
    with _reported(what):
        yield from read(start)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn the client libraries' errors into an InputError."""
    try:
        yield
    except ImportError as error:
        message = "reading from the hub needs the packages `datasets` and `huggingface-hub`"
        hint = "install them with `pip install 'swerl[datasets]'`, or read the rows of a file"
        raise InputError(message, hint=hint) from error
    except InputError:
        raise
    except Exception as error:  # three client libraries without a common base class
        said = str(error).strip().split("\n")[0]
        raise InputError(f"cannot stream {what}: {said:.200}", hint=_HINT) from error
