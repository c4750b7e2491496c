"""The formats in which a sandbox lists, prints and receives the files of a work tree.

A listing is one line `TOKEN`, then a text, perhaps compressed: for each file a record of the token,
mode, size, times and path, then a NUL and the exit code of `find`. The token is random, so no name
of a file contains it. An agent controls the programs that print: every reader here refuses
malformed output, and raises nothing.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from swerl.core.changes import FileKind, TreeFile, is_plain

_MAX_LISTING_BYTES = 128 * 2**20
_CACHE_MARKS = frozenset({"CACHEDIR.TAG", "pyvenv.cfg"})
"""Files that mark their folder as a cache or an environment."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    kind: str
    """`f`, `l`, or another letter for a device, a FIFO or a socket."""
    is_executable: bool
    size: int
    mtime_s: int


def unpacked(packed: bytes) -> dict[bytes, bytes] | None:
    """Return each path with the facts about it; None if the listing is not whole."""
    token, _, data = packed.partition(b"\n")
    if data.startswith(b"\x1f\x8b"):
        unzip = zlib.decompressobj(wbits=31)
        try:
            data = unzip.decompress(data, _MAX_LISTING_BYTES)
        except zlib.error:
            return None
        if not unzip.eof:
            return None
    body, _, code = data.partition(b"\0")
    # `find` reports a folder that it cannot read by exit code 1.
    return _records(token, body) if code in (b"0", b"1") else None


def _records(token: bytes, body: bytes) -> dict[bytes, bytes]:
    """Return the facts of each record by path."""
    facts = {}
    for record in body.split(token)[1:]:
        fields = record.split(b" ", 4)
        if len(fields) == 5:
            facts[fields[4].removesuffix(b"\n")] = b" ".join(fields[:4])
    return facts


def entry_of(facts: bytes) -> TreeEntry | None:
    """Parse the facts about a file; None if they are malformed."""
    try:
        first, size, mtime = facts.split(b" ")[:3]
        if first[:1] in b"flpsbcD" and len(first) <= 5:
            kind, mode = chr(first[0]), int(first[1:], 8)
        else:
            mode = int(first, 16)
            kind = {stat.S_IFREG: "f", stat.S_IFLNK: "l"}.get(stat.S_IFMT(mode), "?")
        return TreeEntry(kind, bool(mode & 0o100), int(size), int(mtime.partition(b".")[0]))
    except (ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """Two listings compared."""

    changed: Mapping[str, TreeEntry]
    new: Set[str]
    """Those of the changed files that are not in the first list."""
    gone: Sequence[str]
    num_left: int


def differing(start: bytes, end: bytes) -> TreeDifference:
    """Compare two listings; a device in place of a file deletes it."""
    old, new = unpacked(start) or {}, unpacked(end) or {}
    entries = {
        path: entry
        for raw, facts in new.items()
        if old.get(raw) != facts and is_plain(path := path_of(raw)) and (entry := entry_of(facts))
    }
    gone = [path for raw in old.keys() - new.keys() if is_plain(path := path_of(raw))]
    gone += [
        path for path, entry in entries.items() if entry.kind not in "fl" and raw_path(path) in old
    ]
    caches = tuple(
        f"{folder}/"
        for path in entries
        if posixpath.basename(path) in _CACHE_MARKS and (folder := posixpath.dirname(path))
    )
    changed = {
        path: entry
        for path, entry in entries.items()
        if entry.kind in "fl" and not (caches and path.startswith(caches))
    }
    added = {path for path in changed if raw_path(path) not in old}
    return TreeDifference(changed, added, gone, len(entries) - len(changed))


def parsed(token: bytes, data: bytes, paths: list[str]) -> dict[str, TreeFile] | None:
    """Parse the output of `_READ`, group by group; None if it is malformed."""
    files: dict[str, TreeFile] = {}
    position = num_read = 0
    while position < len(data):
        head = data.find(b"\0", position)
        count, gap, _ = data[head + 1 : head + 9].partition(b" ")
        if head < 0 or not gap or not count.isdigit():
            return None
        records = _records(token, data[position:head])
        group = paths[num_read : num_read + int(count)]
        letters = data[head + 2 + len(count) :][: int(count)].decode("latin-1")
        position = head + 2 + len(count) + int(count)
        if len(letters) != int(count) or len(group) != int(count):
            return None
        # The targets of links come before the contents of files.
        for kind in "lf":
            for path in (
                path for path, letter in zip(group, letters, strict=True) if letter == kind
            ):
                entry = entry_of(records.get(raw_path(path), b""))
                if not entry or entry.kind != kind or position + entry.size > len(data):
                    return None
                files[path] = file_of(data[position : position + entry.size], entry)
                position += entry.size
        num_read += int(count)
    return files if num_read == len(paths) else None


def file_of(data: bytes, entry: TreeEntry) -> TreeFile:
    kind = FileKind.EXECUTABLE if entry.is_executable else FileKind.REGULAR
    return TreeFile(data, FileKind.LINK if entry.kind == "l" else kind, entry.mtime_s)


def path_list(paths: Iterable[str]) -> bytes:
    """Write paths for `xargs -0`."""
    return b"".join(raw_path(path) + b"\0" for path in paths)


def path_of(raw: bytes) -> str:
    """Return a path that `find` printed; bytes that are no UTF-8 become surrogates."""
    return raw.decode("utf-8", "surrogateescape").removeprefix("./")


def raw_path(path: str) -> bytes:
    """Return a path as a command gets it: none begins with a dash."""
    return b"./" + path.encode("utf-8", "surrogateescape")


def escaped_path(path: str) -> str:
    """Return a path for the `%b` of printf: in ASCII, odd characters as octal escapes."""
    return "".join(
        chr(byte)
        if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "./_-+ ")
        else f"\\0{byte:03o}"
        for byte in raw_path(path)
    )


def packed_files(files: Mapping[str, TreeFile]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed,
        mode="w",
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        for path, file in files.items():
            member = tarfile.TarInfo("./" + path)
            member.mtime = file.mtime_s
            if file.is_link:
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(file.data)
                tar.addfile(member)
            else:
                member.size, member.mode = len(file.data), int(file.kind, 8) & 0o777
                tar.addfile(member, io.BytesIO(file.data))
    return packed.getvalue()
