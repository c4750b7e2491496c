"""Search a sandbox's files for parts of a solution; runs inside it, on Python 3.5 or newer.

It reads a JSON object from standard input and prints one. swerl never imports this file.

Files are told apart by their first bytes, never by their names. A file counts if it is the solved
file by git's id, has enough of the wanted lines, or has a wanted passage: three lines in a row that
only the solution has in this order. Archives, compressed files, git's objects and packs, and texts
in base64, hex, UTF-16 or JSON are opened first.
"""
# Paths are strings: a Path object per file would double the time of a walk.
# formats.py stands in front of this file, so its names are known.
# ruff: noqa: F403, F405, PTH110, PTH113, PTH114, PTH116, PTH118, PTH119, PTH123, PTH202

import binascii
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from typing import Any

from swerl.checks._scan_leaks.formats import *

PIECE = 8 << 20
"""Bytes that are read and searched at once."""
OVERLAP = 1 << 14
MAX_FILE = 256 << 20
MAX_MEMBER = 64 << 20
MAX_UNPACKED = 512 << 20
MAX_DEPTH = 2
"""Archives in archives."""
MAX_HITS = 500
SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bsk-[A-Za-z0-9_-]{32,}"
    rb"|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}\b|_authToken=\S{16,}"
)
SECRET_FOLDERS = ("/root/", "/home/", "/etc/", "/run/secrets/")
BASE64 = re.compile(rb"(?<![A-Za-z0-9+/_\-\r\n])[A-Za-z0-9+/_\-\r\n]{64,}={0,2}")
HEX = re.compile(rb"(?<![0-9a-fA-F\s])[0-9a-fA-F\s]{128,}")
ROOTS = ("/", "/dev/shm", "/tmp", "/var/tmp", "/run", "/home", "/root", "/opt", "/srv")
PRUNED = {"proc", "sys", "dev"}
BROKEN = (
    OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError,
    tarfile.TarError, zipfile.BadZipFile, struct.error, IndexError,
)  # fmt: skip


def main() -> None:
    request = json.loads(sys.stdin.read())
    scan = Scan(request)
    for root in dict.fromkeys((request["workdir"], *ROOTS)):
        scan.walk(root)
    scan.judge_index()
    json.dump(scan.result(), sys.stdout)


class Scan:
    """The parts of a solution to look for, and the files that have them."""

    def __init__(self, request: "dict[str, Any]") -> None:
        self.file_names = request["names"]
        self.top = os.path.realpath(request["workdir"])
        self.wanted = {}  # type: dict[str, set[bytes]]
        self.passages = {}  # type: dict[str, set[tuple[bytes, ...]]]
        for label in ("solution", "tests"):
            self.wanted[label] = {raw(line) for line in request["lines"].get(label, [])}
            rows = request["passages"].get(label, [])
            self.passages[label] = {tuple(raw(line) for line in lines) for lines in rows}
        self.added = {raw(line) for line in request["added"]}
        self.blobs = request["blobs"]
        self.sizes = set(request["sizes"])
        self.sources = {path: raw(text) for path, text in request["sources"].items()}
        self.words = {raw(word) for word in request["words"]}
        self.names = [raw(name) for name in request["names"]]
        self.tails = {tail.rsplit("/", 1)[-1]: tail for tail in request["tails"]}
        self.stems = {name.rsplit(".", 1)[0] for name in self.tails}
        self.deadline = time.time() + request["budget_s"]
        self.hits = []  # type: list[dict[str, Any]]
        self.told = set()  # type: set[tuple[str, str]]
        self.packages = []  # type: list[dict[str, str]]
        self.unchecked = set()  # type: set[str]
        self.seen = set()  # type: set[Any]
        self.num_files = 0
        self.num_left = self.bytes_left = 0
        self.tracked = self.list_tracked(request["base"])
        self.drop_what_base_has()
        lines = self.added.union(*self.wanted.values())
        lines = lines.union(*(rows for found in self.passages.values() for rows in found))
        self.keys = {line.translate(None, MARKS) for line in lines}

    def result(self) -> "dict[str, Any]":
        if self.num_left:
            left = str(self.num_left) + " files of " + str(self.bytes_left >> 20) + " MiB"
            self.unchecked.add("text: out of time: " + left + " were not read")
        return {
            "hits": self.hits[:MAX_HITS],
            "packages": self.packages[:MAX_HITS],
            "unchecked": sorted(self.unchecked)[:MAX_HITS],
            "num_files": self.num_files,
            "environment": dict(os.environ),
            "hostname": socket.gethostname(),
        }

    def list_tracked(self, base: str) -> "set[str]":
        listed = b""
        for commit in filter(None, (base, "HEAD")):
            listed = listed or self.run_git("ls-tree", "-r", "-z", "--name-only", commit)
        names = listed.decode("utf-8", "surrogateescape").split("\0")
        return {os.path.join(self.top, name) for name in names if name}

    def run_git(self, *words: str) -> bytes:
        command = ["git", "-c", "core.fsmonitor=false", "-C", self.top]
        command += words
        env = dict(os.environ, GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_COUNT="1")
        env.update(GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
        try:
            return subprocess.check_output(command, env=env, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            return b""

    def judge_index(self) -> None:
        """Judge staged changes that no file holds."""
        shown = self.run_git("diff", "--cached", "--no-ext-diff", "--no-textconv", "HEAD")
        self.judge(os.path.join(self.top, ".git", "index"), shown)

    def drop_what_base_has(self) -> None:
        """Drop lines and passages that the work tree has anyway: they reveal nothing."""
        for path in self.tracked:
            data = self.content(path)
            if data is None:
                continue
            rows = rows_of(data)
            found = set(rows)
            for lines in self.wanted.values():
                lines -= found
            self.added -= found
            for passages in self.passages.values():
                passages -= common_passages(passages, rows, found)
            self.words -= {word for word in self.words if word in data}

    def walk(self, root: str) -> None:
        try:
            device = os.lstat(root).st_dev
        except OSError:
            return
        for folder, folders, files in os.walk(root, onerror=self.cannot_list):
            folders[:] = [name for name in folders if self.enters(folder, name, device)]
            for name in files:
                look = self.count if time.time() > self.deadline else self.look_at
                look(os.path.join(folder, name), name)

    def count(self, path: str, name: str) -> None:
        """Count a file that there is no time to read."""
        if path not in self.tracked and path not in self.seen and os.path.isfile(path):
            self.num_left += 1
            self.bytes_left += 0 if os.path.islink(path) else os.path.getsize(path)

    def cannot_list(self, error: OSError) -> None:
        self.unchecked.add("text: cannot be listed: " + str(error.filename))

    def is_late(self, where: str) -> bool:
        if time.time() <= self.deadline:
            return False
        self.unchecked.add("text: out of time for reading files at " + where)
        return True

    def enters(self, folder: str, name: str, device: int) -> bool:
        path = os.path.join(folder, name)
        if folder == "/" and name in PRUNED:
            return False
        if path == os.path.join(self.top, ".git"):
            return False
        try:
            own = os.lstat(path)
        except OSError:
            return False
        if (
            own.st_dev != device
            or stat.S_ISLNK(own.st_mode)
            or (own.st_dev, own.st_ino) in self.seen
        ):
            return False
        self.seen.add((own.st_dev, own.st_ino))
        return True

    def look_at(self, path: str, name: str) -> None:
        for word in self.file_names:
            if word.lower() in name.lower() and path not in self.seen:
                self.hit(path, "name", word, 1, 1)
        try:
            own = os.lstat(path)
            if path in self.tracked or path in self.seen or not stat.S_ISREG(own.st_mode):
                return
            self.seen.add(path)
            with open(path, "rb") as file:
                self.num_files += 1
                self.read(path, file, own.st_size, 0)
        except PermissionError:
            # Without this right, an agent cannot read it either.
            pass
        except BROKEN as error:
            self.unchecked.add("text: cannot be read: " + path + ": " + type(error).__name__)
        if name.endswith(".pyc") and name.split(".")[0] in self.stems:
            self.judge_compiled(path, self.content(path))

    def content(self, path: str) -> "bytes | None":
        try:
            if os.path.islink(path) or not os.path.isfile(path):
                return None
            if os.path.getsize(path) > PIECE:
                return None
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            return None

    def read(self, path: str, file: Any, size: int, depth: int) -> None:
        """Read an open file of any kind. A compressed one holds another file, of the same depth."""
        head = file.read(512)
        file.seek(0)
        kind = kind_of(head)
        if kind == "binary":
            return
        if size > MAX_FILE and kind != "text":
            self.unchecked.add("archive: larger than 256 MiB: " + path)
        elif kind in ("tar", "zip") and depth >= MAX_DEPTH:
            self.unchecked.add("archive: in an archive of an archive: " + path)
        elif kind == "zip":
            self.read_zip(path, file, depth)
        elif kind == "tar":
            self.read_tar(path, file, "r:", depth)
        elif kind in STREAMS:
            self.read_stream(path, STREAMS[kind](file), depth)
        elif kind == "zlib" and size <= MAX_MEMBER:
            self.read_object(path, file.read())
        elif kind == "pack" and size > PIECE and os.path.exists(path[:-5] + ".idx"):
            self.read_index(path[:-5] + ".idx")
        elif kind in ("pack", "bundle"):
            self.read_pack(path, file.read())
        elif kind == "closed":
            self.unchecked.add("archive: of a kind that is not read: " + path)
        else:
            self.read_text(path, file, depth)

    def read_stream(self, path: str, stream: Any, depth: int) -> None:
        head = stream.read(512)
        if kind_of(head) == "tar":
            stream.seek(0)
            self.read_tar(path, stream, "r|", depth)
            return
        stream.seek(0)
        data = stream.read(MAX_MEMBER + 1)
        if len(data) > MAX_MEMBER:
            self.unchecked.add("text: larger than 64 MiB when unpacked: " + path)
        self.read_bytes(path, data[:MAX_MEMBER], depth)

    def read_bytes(self, path: str, data: bytes, depth: int) -> None:
        try:
            self.read(path, io.BytesIO(data), len(data), depth)
        except BROKEN:
            self.judge(path, data)

    def read_text(self, path: str, file: Any, depth: int) -> None:
        """Search a file in pieces that overlap, so that memory stays bounded."""
        before = b""
        total = 0
        while not self.is_late(path):
            data = file.read(PIECE)
            if not data:
                return
            whole = not before and len(data) < PIECE
            self.judge(path, before + data)
            self.decode(path, before + data, depth)
            if whole and "!" not in path:
                self.compare(path, os.path.basename(path), data)
            before = data[-OVERLAP:]
            total += len(data)
            if total > MAX_UNPACKED:
                self.unchecked.add("text: larger than 512 MiB: " + path)
                return

    def decode(self, path: str, data: bytes, depth: int) -> None:
        """Judge what the text holds in other encodings."""
        if depth >= MAX_DEPTH:
            return
        if b"\0" in data[:4096]:
            if data.count(b"\0", 0, 4096) >= min(len(data), 4096) // 4:
                self.judge(path, data.replace(b"\0", b""))
            return
        if b"%0A" in data or b"%20" in data:
            self.judge(path, PERCENT.sub(lambda match: bytes([int(match.group(1), 16)]), data))
        for match in HEX.finditer(data):
            text = b"".join(match.group().split())
            if len(text) % 2 == 0:
                self.read_bytes(path + "!hex", binascii.unhexlify(text), depth + 1)
        for match in BASE64.finditer(data):
            text = b"".join(match.group().split()).rstrip(b"=").translate(URL_SAFE)
            try:
                plain = binascii.a2b_base64(text + b"=" * (-len(text) % 4))
            except ValueError:
                continue
            self.read_bytes(path + "!base64", plain, depth + 1)

    def judge(self, path: str, data: bytes) -> None:
        """Note a hit if a text is the solution or holds parts of it."""
        if len(data) in self.sizes:
            self.judge_id(path, data)
        if b"\\n" in data:
            plain = data.replace(b"\\n", b"\n").replace(b'\\"', b'"').replace(b"\\t", b"\t")
            self.judge(path, plain)
        # Most files have no line in common, which this finds much faster than stripping each line.
        is_plain = b"\0" not in data[:8192]
        if is_plain and self.keys.isdisjoint(data.translate(None, MARKS).split(b"\n")):
            rows = []  # type: list[bytes]
        else:
            rows = rows_of(data)
        found = set(rows)
        for label, lines in self.wanted.items():
            common = lines & found
            if common and len(common) >= min(3, len(lines)):
                self.hit(path, label, text_of(min(common)), len(common), len(lines))
                continue
            passages = self.passages[label]
            same = common_passages(passages, rows, found)
            if not same and b"\n-" in data:
                kept = rows_of(REMOVED.sub(b"", data))
                same = common_passages(passages, kept, set(kept))
            # A short fix has few passages, and the end of a file may cut one off.
            if len(same) >= (1 if len(passages) <= 4 else 2):
                self.hit(path, label, text_of(b" / ".join(min(same))), len(same), len(passages))
        if self.added & found and b"@@ " in data:
            self.judge_diff(path, data)
        for name in self.names:
            if name in data:
                self.hit(path, "name", name.decode(), 1, 1)
        if path.startswith(SECRET_FOLDERS) and SECRET.search(data) and others_read(path):
            self.hit(path, "secret", "a key or token that every user can read", 1, 1)

    def judge_id(self, path: str, data: bytes) -> None:
        for line_ends in (data, data.replace(b"\r\n", b"\n")):
            whole = b"blob " + str(len(line_ends)).encode() + b"\0" + line_ends
            label = self.blobs.get(hashlib.sha1(whole).hexdigest())
            if label:
                self.hit(path, label, "the whole file as the " + label + " leaves it", 1, 1)
                return

    def judge_diff(self, path: str, data: bytes) -> None:
        """Judge short lines: a diff adds them to a file that the solution changes."""
        if not any(tail.encode() in data for tail in self.tails):
            return
        plus = {line[1:].strip(MARKS) for line in data.split(b"\n") if line[:1] == b"+"}
        common = self.added & plus
        if common:
            self.hit(path, "solution", text_of(min(common)), len(common), len(self.added))

    def judge_compiled(self, path: str, data: "bytes | None") -> None:
        """Judge compiled Python by its new words, and by the source that its header names."""
        common = {word for word in self.words if data and word in data}
        if common and len(common) >= min(2, len(self.words)):
            self.hit(path, "solution", min(common).decode(), len(common), len(self.words))
            return
        stem = os.path.basename(path).split(".")[0]
        for tail, source in self.sources.items():
            if (
                not data
                or os.path.basename(tail) != stem + ".py"
                or not compiled_from(data, source)
            ):
                continue
            own = self.content(os.path.join(self.top, tail))
            if own is None or not compiled_from(data, own) or same_code(data, source, own):
                self.hit(path, "solution", "compiled from " + tail + " as solved", 1, 1)
            elif data[:4] != importlib.util.MAGIC_NUMBER:
                self.unchecked.add("text: compiled by another Python: " + path)

    def compare(self, path: str, name: str, data: bytes) -> None:
        """Note copies of changed files that differ from those of the work tree."""
        tail = self.tails.get(name)
        if tail is None or path.startswith(self.top + "/") or not path.endswith("/" + short(tail)):
            return
        own = self.content(os.path.join(self.top, tail))
        if own is not None and own != data:
            self.packages.append({"path": path, "tail": tail, "version": version_near(path, tail)})

    def read_zip(self, path: str, file: Any, depth: int) -> None:
        left = MAX_UNPACKED
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                left -= entry.file_size
                if self.is_late(path) or not self.fits(path, entry.filename, entry.file_size, left):
                    continue
                self.read_bytes(path + "!" + entry.filename, archive.read(entry), depth + 1)

    def read_tar(self, path: str, opened: Any, mode: Any, depth: int) -> None:
        left = MAX_UNPACKED
        with tarfile.open(fileobj=opened, mode=mode) as archive:
            for entry in archive:
                if not entry.isfile():
                    continue
                left -= entry.size
                if self.is_late(path):
                    return
                if self.fits(path, entry.name, entry.size, left):
                    file = archive.extractfile(entry)
                    data = file.read() if file else b""
                    self.read_bytes(path + "!" + entry.name, data, depth + 1)

    def fits(self, path: str, name: str, size: int, left: int) -> bool:
        if size <= MAX_MEMBER and left >= 0:
            return True
        self.unchecked.add("archive: too large to unpack: " + path + "!" + name)
        return False

    def read_object(self, path: str, data: bytes) -> None:
        """Read a zlib stream: a loose object of git, or any other text."""
        opened = zlib.decompressobj()
        plain = opened.decompress(data, MAX_MEMBER)
        if opened.unconsumed_tail:
            self.unchecked.add("text: larger than 64 MiB when unpacked: " + path)
        head, _, _ = plain[:64].partition(b"\0")
        if OBJECT.match(head):
            plain = plain[len(head) + 1 :]
        self.judge(path, plain)

    def read_index(self, path: str) -> None:
        """Look for the solved files among the ids of a large pack."""
        with open(path, "rb") as file:
            ids = file.read()
        for name, label in self.blobs.items():
            if binascii.unhexlify(name) in ids:
                self.hit(path[:-4] + ".pack", label, "the file " + name + " in a pack", 1, 1)

    def read_pack(self, path: str, data: bytes) -> None:
        """Judge every file in a pack or bundle; a change of a file outside it is judged alone."""
        start = data.find(b"PACK")
        count = struct.unpack(">L", data[start + 8 : start + 12])[0]
        position = start + 12
        whole = {}  # type: dict[Any, bytes]
        room = MAX_UNPACKED // 4
        for _ in range(count):
            if self.is_late(path):
                return
            kind, base, plain, end = read_entry(data, position)
            if base is not None:
                key = position - base if isinstance(base, int) else base
                plain = patched(whole[key], plain) if key in whole else inserted(plain)
            if room > 0:
                room -= len(plain)
                whole[position] = plain
                for word in (b"blob", b"tree"):
                    header = word + b" " + str(len(plain)).encode() + b"\0"
                    whole[hashlib.sha1(header + plain).digest()] = plain
            else:
                self.unchecked.add("pack: too large to unpack: " + path)
            if kind in (3, 6, 7):
                self.judge(path + "!blob", plain)
            position = end

    def hit(self, path: str, label: str, example: str, count: int, total: int) -> None:
        if (path.split("!")[0], label) in self.told:
            return
        self.told.add((path.split("!")[0], label))
        self.hits.append(
            {"path": path, "label": label, "example": example, "count": count, "total": total}
        )


PERCENT = re.compile(rb"%([0-9A-Fa-f]{2})")
REMOVED = re.compile(rb"^-.*\n?", re.MULTILINE)
OBJECT = re.compile(rb"(blob|tree|commit|tag) \d+$")
URL_SAFE = bytes.maketrans(b"-_", b"+/")


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def others_read(path: str) -> bool:
    try:
        return bool(os.stat(path.split("!")[0]).st_mode & 0o004)
    except OSError:
        return False


main()
