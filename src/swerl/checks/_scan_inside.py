"""Search a sandbox's files for parts of a solution; runs inside it, on Python 3.5 or newer.

It reads a JSON object from standard input and prints one; scan_leaks.py has the meaning of both.
swerl never imports this file. Archives, compressed files and texts in JSON are opened first; no
other encoding is. The first bytes of a file decide how it is read, never its name.
"""
# Paths are strings: a Path object per file would double the time of a walk.
# ruff: noqa: B905, SIM115, PTH114, PTH118, PTH123, PTH202

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from typing import Any

PIECE = 8 << 20
"""Bytes that are read and searched at once; pieces overlap."""
OVERLAP = 1 << 14
MAX_ARCHIVE = 256 << 20
MAX_MEMBER = 64 << 20
MAX_DEPTH = 2
"""Archives in archives."""
MAX_HITS = 500
MARKS = b" \t\r\f\0+->|\xff\xfe\xef\xbb\xbf"
"""Marks of diffs, quotes and the start of a file, at both ends of a line."""
STARTS = (
    (b"PK\3\4", "zip"), (b"\x1f\x8b", "gz"), (b"BZh", "bz2"), (b"\xfd7zXZ\0", "xz"),
    (b"PACK\0\0\0", "closed"), (b"# v2 git bundle", "closed"), (b"# v3 git bundle", "closed"),
    (b"\x28\xb5\x2f\xfd", "closed"), (b"7z\xbc\xaf", "closed"), (b"Rar!", "closed"),
    (b"\x7fELF", "binary"), (b"\x89PNG", "binary"), (b"\xff\xd8\xff", "binary"),
    (b"wOFF", "binary"), (b"wOF2", "binary"), (b"\0\1\0\0\0", "binary"), (b"!<arch>\n", "binary"),
    (b"\xde\x12\x04\x95", "binary"), (b"\xca\xfe\xba\xbe", "binary"), (b"\0asm", "binary"),
)  # fmt: skip
REMOVED = re.compile(rb"^-.*\n?", re.MULTILINE)
ROOTS = ("/", "/dev/shm", "/tmp", "/var/tmp", "/run", "/home", "/root", "/opt", "/srv")
DAMAGED = (
    OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, tarfile.TarError,
    zipfile.BadZipFile,
)  # fmt: skip


def main() -> None:
    scan = Scan(json.loads(sys.stdin.read()))
    for root in dict.fromkeys((scan.top, *ROOTS)):
        scan.walk(root)
    if scan.num_late:
        late = f"{scan.num_late:,} files of {scan.bytes_late >> 20:,} MiB"
        scan.unchecked.add("out of time: " + late + " were not read")
    result = {"hits": scan.hits[:MAX_HITS], "unchecked": sorted(scan.unchecked)[:MAX_HITS]}
    json.dump(dict(result, environment=dict(os.environ)), sys.stdout)


class Scan:
    """The parts of a solution to look for, and the files that have them."""

    def __init__(self, request: "dict[str, Any]") -> None:
        self.top = os.path.realpath(request["workdir"])
        self.lines = {label: set(map(raw, lines)) for label, lines in request["lines"].items()}
        self.passages = {
            label: {tuple(map(raw, lines)) for lines in passages}
            for label, passages in request["passages"].items()
        }
        self.added = set(map(raw, request["added"]))
        self.blobs = request["blobs"]
        self.sizes = set(request["sizes"])
        self.words = set(map(raw, request["words"]))
        self.names = request["names"]
        self.tails = request["tails"]
        self.installed = request["installed"]
        files = map(os.path.basename, request["tails"] + request["tests"])
        self.stems = {"/" + file.lstrip(".").split(".")[0] + "." for file in files}
        self.deadline = time.time() + request["budget_s"]
        self.hits = []  # type: list[dict[str, Any]]
        self.unchecked = set()  # type: set[str]
        self.seen = set()  # type: set[Any]
        self.num_late = self.bytes_late = 0
        self.tracked = self.list_tracked(request["base"])
        self.drop_lines_of_the_base()
        lines = self.added.union(*self.lines.values())
        lines = lines.union(*(rows for passages in self.passages.values() for rows in passages))
        self.keys = {line.translate(None, MARKS) for line in lines}

    def list_tracked(self, base: str) -> "set[str]":
        listed = b""
        for commit in filter(None, (base, "HEAD")):
            listed = listed or git("-C", self.top, "ls-tree", "-r", "-z", "--name-only", commit)
        names = listed.decode("utf-8", "surrogateescape").split("\0")
        return {os.path.join(self.top, name) for name in names if name}

    def drop_lines_of_the_base(self) -> None:
        """Drop lines and passages that the work tree has anyway: they reveal nothing."""
        for path in self.tracked:
            data = content(path)
            rows = rows_of(data or b"")
            self.added -= set(rows)
            self.words -= {word for word in self.words if data and word in data}
            for label in self.lines:
                self.lines[label] -= set(rows)
            for label, passages in self.passages.items():
                self.passages[label] = passages - common_passages(passages, rows)

    def walk(self, root: str) -> None:
        try:
            device = os.lstat(root).st_dev
        except OSError:
            return
        for folder, folders, files in os.walk(root):
            # Repositories hold nothing else than hiding the future has left there.
            is_repository = "HEAD" in files and "objects" in folders and "refs" in folders
            names = [] if is_repository else folders
            folders[:] = [name for name in names if self.enters(folder, name, device)]
            for name in files:
                self.look_at(os.path.join(folder, name), name)

    def enters(self, folder: str, name: str, device: int) -> bool:
        if folder == "/" and name in ("proc", "sys", "dev"):
            return False
        try:
            entry = os.lstat(os.path.join(folder, name))
        except OSError:
            return False
        key = entry.st_dev, entry.st_ino
        if entry.st_dev != device or stat.S_ISLNK(entry.st_mode) or key in self.seen:
            return False
        self.seen.add(key)
        return True

    def look_at(self, path: str, name: str) -> None:
        if path in self.tracked or path in self.seen:
            return
        self.seen.add(path)
        for word in self.names:
            if word.lower() in name.lower():
                self.hit(path, "name", word, 1, 1)
        try:
            entry = os.lstat(path)
            if not stat.S_ISREG(entry.st_mode):
                return
            if time.time() > self.deadline:
                self.num_late += 1
                self.bytes_late += entry.st_size
                return
            with open(path, "rb") as file:
                self.read(path, file, entry.st_size, 0)
        except PermissionError:
            pass  # without this right, an agent cannot read it either
        except DAMAGED as error:
            self.unchecked.add("cannot be read: " + path + ": " + type(error).__name__)
        if name.endswith(".pyc"):
            self.judge_compiled(path, content(path) or b"")

    def read(self, path: str, file: Any, size: int, depth: int) -> None:
        """Read an open file of any kind; a compressed one holds another file, of the same depth."""
        kind = kind_of(file.read(512))
        file.seek(0)
        if kind == "closed":
            self.unchecked.add("archive of a kind that is not read: " + path)
        elif kind in ("zip", "tar") and (size > MAX_ARCHIVE or depth >= MAX_DEPTH):
            self.unchecked.add("archive too large or in an archive of an archive: " + path)
        elif kind == "zip":
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    if self.fits(path, entry.filename, entry.file_size):
                        inner = path + "!" + entry.filename
                        self.read_bytes(inner, archive.read(entry), depth + 1)
        elif kind == "tar":
            self.read_tar(path, tarfile.open(fileobj=file, mode="r:"), depth)
        elif kind in ("gz", "bz2", "xz"):
            opener = {"gz": gzip.GzipFile, "bz2": bz2.BZ2File, "xz": lzma.LZMAFile}[kind]
            stream = opener(fileobj=file) if kind == "gz" else opener(file)  # type: Any
            if kind_of(stream.read(512)) == "tar":
                stream.seek(0)
                self.read_tar(path, tarfile.open(fileobj=stream, mode="r|"), depth)
                return
            stream.seek(0)
            data = stream.read(MAX_MEMBER + 1)
            self.fits(path, "", len(data))
            self.read_bytes(path, data[:MAX_MEMBER], depth)
        elif kind != "binary":
            self.read_text(path, file)

    def read_tar(self, path: str, archive: "tarfile.TarFile", depth: int) -> None:
        with archive:
            for entry in archive:
                if entry.isfile() and self.fits(path, entry.name, entry.size):
                    data = archive.extractfile(entry).read()  # type: ignore[union-attr]
                    self.read_bytes(path + "!" + entry.name, data, depth + 1)

    def fits(self, path: str, name: str, size: int) -> bool:
        fits = size <= MAX_MEMBER and time.time() <= self.deadline
        if not fits:
            self.unchecked.add("too large to unpack, or out of time: " + path + "!" + name)
        return fits

    def read_bytes(self, path: str, data: bytes, depth: int) -> None:
        try:
            self.read(path, io.BytesIO(data), len(data), depth)
        except DAMAGED:
            self.judge(path, data)

    def read_text(self, path: str, file: Any) -> None:
        """Search a file in pieces, so that memory stays bounded."""
        before = b""
        for data in iter(lambda: file.read(PIECE), b""):
            if time.time() > self.deadline:
                self.unchecked.add("out of time for reading " + path)
                return
            self.judge(path, before + data)
            before = data[-OVERLAP:]

    def judge(self, path: str, data: bytes) -> None:
        """Note a hit if a text is the solution or holds parts of it."""
        if len(data) in self.sizes:
            for text in (data, data.replace(b"\r\n", b"\n")):
                name = hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()
                if name in self.blobs:
                    self.hit(path, self.blobs[name], "the whole file", 1, 1)
        if b"\\n" in data:
            unescaped = data.replace(b"\\n", b"\n").replace(b'\\"', b'"').replace(b"\\t", b"\t")
            self.judge(path, unescaped)
        for name in self.names:
            if raw(name) in data:
                self.hit(path, "name", name, 1, 1)
        # Most files have no line in common, which this finds much faster than stripping each line.
        is_text = b"\0" not in data[:8192]
        if is_text and self.keys.isdisjoint(data.translate(None, MARKS).split(b"\n")):
            return
        rows = rows_of(data)
        for label, lines in self.lines.items():
            common = lines & set(rows)
            if self.is_copy(path, len(common), len(lines), least=3):
                self.hit(path, label, text_of(min(common)), len(common), len(lines))
                continue
            passages = self.passages[label]
            same = common_passages(passages, rows)
            if not same and b"\n-" in data:
                same = common_passages(passages, rows_of(REMOVED.sub(b"", data)))
            # A short fix has few passages, and the end of a file may cut one off.
            least = 1 if len(passages) <= 4 else 2
            if self.is_copy(path, len(same), len(passages), least=least):
                example = text_of(b" / ".join(min(same)))
                self.hit(path, label, example, len(same), len(passages))
        # Short lines count if a diff adds them to a file that the solution changes.
        if b"@@ " in data and any(raw(tail) in data for tail in self.tails):
            plus = {line[1:].strip(MARKS) for line in data.split(b"\n") if line[:1] == b"+"}
            if self.added & plus:
                self.hit(path, "solution", text_of(min(self.added & plus)), 1, len(self.added))

    def is_copy(self, path: str, count: int, total: int, least: int) -> bool:
        """Return True if a file has enough of what the solution adds."""
        if count < max(1, min(least, total)):
            return False
        # Packages have a few lines of many solutions, which are idioms.
        is_most = count >= 3 and 2 * count >= total
        is_named = any(stem in path.replace("!", "/") for stem in self.stems)
        return is_most or is_named or not any(place in path for place in self.installed)

    def judge_compiled(self, path: str, data: bytes) -> None:
        """Judge compiled Python by its new words."""
        common = {word for word in self.words if word in data}
        if self.is_copy(path, len(common), len(self.words), least=2):
            self.hit(path, "solution", text_of(min(common)), len(common), len(self.words))

    def hit(self, path: str, label: str, example: str, count: int, total: int) -> None:
        if (path.split("!")[0], label) not in self.seen:
            self.seen.add((path.split("!")[0], label))
            match = {"path": path, "label": label, "example": example}
            self.hits.append(dict(match, count=count, total=total))


def kind_of(head: bytes) -> str:
    """Return the kind of a file by its first 512 bytes."""
    for start, kind in STARTS:
        if head.startswith(start):
            return kind
    return "tar" if head[257:262] == b"ustar" else "text"


def rows_of(data: bytes) -> "list[bytes]":
    """Return the lines that are not blank, without indent and without the marks of a diff."""
    if b"\0" in data[:8192]:
        data = data.replace(b"\0", b"\n")
    rows = (line.strip(MARKS) for line in data.split(b"\n"))
    return [row for row in rows if row]


def common_passages(
    passages: "set[tuple[bytes, ...]]", rows: "list[bytes]"
) -> "set[tuple[bytes, ...]]":
    """Return the passages that stand in the rows, forwards or, as in Vim's files, backwards."""
    present = set(rows)
    likely = {lines for lines in passages if present.issuperset(lines)}
    common = set()  # type: set[tuple[bytes, ...]]
    for order in (rows, rows[::-1]) if likely else ():
        for length in {len(lines) for lines in likely}:
            common |= likely & set(zip(*(order[skip:] for skip in range(length))))
    return common


def git(*words: str) -> bytes:
    """Return git's output; empty after a failure."""
    command = ("git", "-c", "core.fsmonitor=false", "-c", "safe.directory=*", *words)
    env = dict(os.environ, GIT_CONFIG_NOSYSTEM="1", HOME="/nonexistent", GIT_CONFIG_COUNT="1")
    env.update(GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
    try:
        return subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ).stdout
    except OSError:
        return b""


def content(path: str) -> "bytes | None":
    try:
        if os.path.islink(path) or os.path.getsize(path) > PIECE:
            return None
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")


main()
