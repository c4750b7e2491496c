"""Read files of an image: their kind, rows of text, packs of git, and compiled Python.

Runs inside a sandbox, in front of scan.py, on Python 3.5 or newer. swerl never imports this file.
"""
# `zip(strict=)` is newer than this Python, and a Path object per file would cost time.
# ruff: noqa: B905, PTH120, PTH208

import bz2
import gzip
import importlib.util
import lzma
import marshal
import os
import re
import struct
import zlib
from typing import Any

MARKS = b" \t\r\f\0+->|\xff\xfe\xef\xbb\xbf"
"""Marks of diffs, quotes and the start of a file, at both ends of a line."""
BINARY = (
    b"\x7fELF", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"wOFF", b"wOF2", b"OTTO", b"\0\1\0\0\0",
    b"\xde\x12\x04\x95", b"\xca\xfe\xba\xbe", b"!<arch>\n", b"\0asm",
)  # fmt: skip
"""Programs, pictures, fonts, libraries and translations."""
STREAMS = {
    "gz": lambda file: gzip.GzipFile(fileobj=file),
    "bz2": lambda file: bz2.BZ2File(file),
    "xz": lambda file: lzma.LZMAFile(file),  # noqa: SIM115
}  # type: dict[str, Any]


def kind_of(head: bytes) -> str:
    """Return the kind of a file by its first 512 bytes."""
    starts = (
        (b"PK\3\4", "zip"), (b"\x1f\x8b", "gz"), (b"BZh", "bz2"), (b"\xfd7zXZ\0", "xz"),
        (b"\x5d\0\0", "xz"), (b"PACK\0\0\0", "pack"), (b"# v2 git bundle", "bundle"),
        (b"# v3 git bundle", "bundle"), (b"\x28\xb5\x2f\xfd", "closed"), (b"7z\xbc\xaf", "closed"),
        (b"Rar!", "closed"),
    )  # fmt: skip
    for start, kind in starts:
        if head.startswith(start):
            return kind
    if head[257:262] == b"ustar":
        return "tar"
    if head.startswith(BINARY):
        return "binary"
    # The two bytes before a zlib stream are a multiple of 31.
    if head[:1] == b"\x78" and len(head) > 2 and (head[0] * 256 + head[1]) % 31 == 0:
        return "zlib" if head[1] in (0x01, 0x5E, 0x9C, 0xDA) else "text"
    return "text"


def rows_of(data: bytes) -> "list[bytes]":
    """Return the lines that are not blank, without indent and without the marks of a diff."""
    if b"\0" in data[:8192]:
        data = data.replace(b"\0", b"\n")
    rows = (line.strip(MARKS) for line in data.split(b"\n"))
    return [row for row in rows if row]


def common_passages(
    passages: "set[tuple[bytes, ...]]", rows: "list[bytes]", found: "set[bytes]"
) -> "set[tuple[bytes, ...]]":
    """Return the passages that stand in the rows, forwards or, as in Vim's files, backwards."""
    likely = {lines for lines in passages if found.issuperset(lines)}
    if not likely:
        return likely
    size = max(map(len, likely))
    present = set()  # type: set[tuple[bytes, ...]]
    for order in (rows, rows[::-1]):
        for length in range(1, size + 1):
            present |= likely & set(zip(*(order[skip:] for skip in range(length))))
    return present


def read_entry(data: bytes, position: int) -> "tuple[int, Any, bytes, int]":
    """Return an entry of a pack: its kind, its base (a distance or an id), its content, its end."""
    byte = data[position]
    kind, position = byte >> 4 & 7, position + 1
    while byte & 0x80:
        byte = data[position]
        position += 1
    base = None  # type: Any
    if kind == 7:
        base, position = data[position : position + 20], position + 20
    elif kind == 6:
        byte = data[position]
        base, position = byte & 0x7F, position + 1
        while byte & 0x80:
            byte = data[position]
            base, position = ((base + 1) << 7) | (byte & 0x7F), position + 1
    opened = zlib.decompressobj()
    parts = []
    size = 4096
    while not opened.eof:
        piece = data[position : position + size]
        if not piece:
            raise EOFError
        parts.append(opened.decompress(piece))
        position += len(piece) - len(opened.unused_data)
        size = min(size * 2, 1 << 20)
    return kind, base, b"".join(parts), position


def steps(delta: bytes) -> "list[tuple[int, int, bytes]]":
    """Return the steps of a delta: offset and size of a copy, or the bytes to insert."""
    found = []
    position = 0
    for _ in range(2):
        while delta[position] & 0x80:
            position += 1
        position += 1
    while position < len(delta):
        code = delta[position]
        position += 1
        if not code & 0x80:
            found.append((0, 0, delta[position : position + code]))
            position += code
            continue
        numbers = []
        for shift in range(7):
            numbers.append(delta[position] if code >> shift & 1 else 0)
            position += code >> shift & 1
        offset = numbers[0] | numbers[1] << 8 | numbers[2] << 16 | numbers[3] << 24
        found.append((offset, numbers[4] | numbers[5] << 8 | numbers[6] << 16 or 0x10000, b""))
    return found


def patched(base: bytes, delta: bytes) -> bytes:
    return b"".join(
        text if not size else base[offset : offset + size] for offset, size, text in steps(delta)
    )


def inserted(delta: bytes) -> bytes:
    return b"\n".join(text for _, size, text in steps(delta) if not size)


def compiled_from(data: bytes, source: bytes) -> bool:
    """Return True if the header of compiled Python names this source, by its size or hash."""
    flags = struct.unpack("<L", data[4:8])[0] if len(data) >= 16 else 4
    if flags & 1 and flags < 4:
        try:
            from _imp import source_hash  # Python 3.7
        except ImportError:
            return False
        return bool(source_hash(struct.unpack("<L", data[:4])[0], source) == data[8:16])
    size = struct.pack("<L", len(source))
    return data[12:16] == size if flags == 0 else data[8:12] == size


def same_code(data: bytes, source: bytes, own: bytes) -> bool:
    """Return True if compiled Python is of a source and not of another one of equal size."""
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    for start in (16, 12):
        try:
            found = shape_of(marshal.loads(data[start:]))
            shapes = [shape_of(compile(text, "f", "exec", 0, True)) for text in (source, own)]
        except (ValueError, EOFError, TypeError, SyntaxError):
            continue
        return found == shapes[0] != shapes[1]
    return False


def shape_of(code: Any) -> "tuple[Any, ...]":
    inner = [shape_of(each) if hasattr(each, "co_code") else repr(each) for each in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, tuple(inner))


def short(tail: str) -> str:
    return "/".join(tail.split("/")[-2:])


def version_near(path: str, tail: str) -> str:
    """Return the version in the metadata beside an installed package; empty if unknown."""
    package = short(tail).split("/")[0].lower().replace("-", "_")
    folder = os.path.dirname(os.path.dirname(path))
    for base in (folder, os.path.dirname(folder)):
        try:
            names = os.listdir(base)
        except OSError:
            continue
        for name in names:
            match = re.match(r"(.+?)-([0-9][^-]*)(-.*)?\.(dist-info|egg-info)$", name)
            if match and match.group(1).lower().replace("-", "_") == package:
                return match.group(2)
    return ""
