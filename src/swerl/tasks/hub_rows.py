"""Rows streamed from the Hugging Face hub, without storing them, at one pinned commit."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice

from swerl.errors import InputError
from swerl.tasks.rows import Rows, RowSource, stream_rows

_HINT = "check the id, the split and the network, or pass --rows FILE"


def hub_rows(repo_id: str, split: str) -> RowSource:
    """Return the rows of one split. Raises InputError where the hub does not have it."""
    commit = _commit(repo_id)
    name = f"{repo_id}@{commit} {split}"
    return RowSource(name, partial(_split_rows, repo_id, split, commit), lambda: None)


def hub_file_rows(repo_id: str, pattern: str) -> RowSource:
    """Return the rows of the files that match the pattern, one file after the other."""
    commit = _commit(repo_id)
    with _reported(repo_id):
        from huggingface_hub import HfApi

        paths = HfApi().list_repo_files(repo_id, repo_type="dataset", revision=commit)
    files = sorted(fnmatch.filter(paths, pattern))
    if not files:
        message = f"{repo_id} holds no file {pattern}"
        raise InputError(message, hint="pass another --repo-id, or --rows FILE")
    read = partial(_file_rows, repo_id, files, commit)
    return RowSource(f"{repo_id}@{commit} {pattern}", read, lambda: None)


def _split_rows(repo_id: str, split: str, commit: str, start: int) -> Rows:
    with _reported(f"{repo_id} ({split})"):
        from datasets import load_dataset

        rows = load_dataset(repo_id, split=split, streaming=True, revision=commit)
        yield from rows.skip(start) if start else rows


def _file_rows(repo_id: str, files: list[str], commit: str, start: int) -> Rows:
    with _reported(repo_id):
        yield from islice(
            chain.from_iterable(_one_file(repo_id, path, commit) for path in files), start, None
        )


def _one_file(repo_id: str, path: str, commit: str) -> Rows:
    from huggingface_hub import HfFileSystem

    with HfFileSystem().open(f"datasets/{repo_id}@{commit}/{path}", "rb") as stream:
        yield from stream_rows(stream, path)


def _commit(repo_id: str) -> str:
    with _reported(repo_id):
        import datasets  # noqa: F401  said now rather than after the first request
        from huggingface_hub import HfApi

        return HfApi().dataset_info(repo_id).sha or "main"


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn what the client libraries raise into one error of ours."""
    try:
        yield
    except ImportError as error:
        message = "reading from the hub needs the packages `datasets` and `huggingface-hub`"
        hint = "install them with `pip install 'swerl[datasets]'`, or pass --rows FILE"
        raise InputError(message, hint=hint) from error
    except InputError:
        raise
    except Exception as error:  # three client libraries without a common base class
        said = str(error).strip().split("\n")[0]
        message = f"cannot stream {what}: {said:.200}"
        raise InputError(message, hint=f"{_HINT}; the same command goes on") from error
