"""Files of lines: JSONL, packed by gzip or zstd or not, and a JSON list that is read whole."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import IO, Any

import orjson

from swerl.core.errors import InputError, TaskError
from swerl.tasks.datasets import Row

CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs.github.com/spec/"
"""How the small text begins that stands for a file which Git LFS did not fetch."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_NOT_JSON = (b"NaN", b"Infinity")
"""Numbers that Python's own `json` writes and JSON does not have."""


def file_lines(opened: Callable[[], IO[bytes]]) -> Iterator[bytes]:
    """Yield a file's lines that are not blank, or a list's entries. Raises OSError, InputError."""
    with _lines(opened) as lines:
        first = next(lines, b"")
        if first.startswith(b"["):
            yield from map(orjson.dumps, _listed(b"".join([first, *lines])))
        elif first:
            yield first
            yield from lines


def parse(line: bytes) -> Row | TaskError:
    """Return the row of a line."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if (row := _lenient(line)) is None:
            return TaskError(f"the line is no JSON: {error.msg}")
    return row if isinstance(row, dict) else TaskError("the line is no JSON object")


def count_lines(opened: Callable[[], IO[bytes]]) -> int | None:
    """Return how many lines there are, blank ones too; nothing where reading is all that tells."""
    with opened() as stream:
        head = stream.read(len(_ZSTD))
        if head.startswith((_GZIP, _ZSTD, b"[")):
            return None
        chunks = chain([head], iter(partial(stream.read, CHUNK_BYTES), b""))
        return sum(chunk.count(b"\n") for chunk in chunks)


def check_fetched(head: bytes) -> None:
    """Raise InputError where a file begins as Git LFS's stand-in for it does."""
    if head.startswith(_LFS):
        raise InputError(
            "only Git LFS's pointer to the file is here",
            hint="fetch the file itself: `git lfs pull`",
        )


@contextmanager
def _lines(opened: Callable[[], IO[bytes]]) -> Iterator[Iterator[bytes]]:
    """Yield the lines of a file that are not blank, unpacked."""
    with opened() as stream:
        first = stream.readline()
        if not first.startswith((_GZIP, _ZSTD)):
            yield _kept(first, stream)
            return
    with opened() as packed, _unpacked(packed, first) as stream:
        try:
            yield _kept(stream.readline(), stream)
        except (EOFError, zlib.error) as error:
            raise OSError(f"it is damaged or cut off: {error}") from error


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
            raise OSError(f"it is no JSON list: {error.msg}") from error
    return list(found)


def _lenient(text: bytes) -> Any:
    """Return JSON in which numbers that it does not have are null; None where that is not all."""
    if not any(name in text for name in _NOT_JSON):
        return None
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
