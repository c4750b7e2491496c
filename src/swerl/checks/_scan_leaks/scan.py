"""Search a sandbox's files for parts of a solution; runs inside it, on Python 3.5 or newer.

It reads a JSON object from standard input and prints one. swerl never imports this file.
"""
# Paths are strings: a Path object per file would double the time of a walk.
# ruff: noqa: PTH113, PTH114, PTH116, PTH118, PTH120, PTH123, PTH202, PTH208

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from typing import Any

MAX_FILE = 4 << 20
MAX_ARCHIVE = 256 << 20
MAX_HITS = 50
ARCHIVES = (".zip", ".whl", ".egg", ".jar", ".body", ".conda")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
BINARY = (".so", ".png", ".jpg", ".gif", ".ttf", ".woff", ".woff2", ".gz", ".xz", ".bz2", ".mo")
MARKS = b" \t\r\f+->|"
SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bsk-[A-Za-z0-9_-]{32,}"
    rb"|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}\b|_authToken=\S{16,}"
)
SECRET_FOLDERS = ("/root/", "/home/", "/etc/", "/run/secrets/")
PRUNED = {"proc", "sys", "dev"}


def main() -> None:
    request = json.loads(sys.stdin.read())
    scan = Scan(request)
    for root in ("/", request["workdir"]):
        scan.walk(root)
    scan.judge_index()
    json.dump(scan.result(), sys.stdout)


class Scan:
    """The lines to look for, and the files that have them."""

    def __init__(self, request: "dict[str, Any]") -> None:
        self.file_names = request["names"]
        self.top = os.path.realpath(request["workdir"])
        self.wanted = {}  # type: dict[str, set[bytes]]
        for label, lines in request["lines"].items():
            self.wanted[label] = {line.encode() for line in lines}
        self.words = {word.encode() for word in request["words"]}
        self.names = [name.encode() for name in request["names"]]
        self.tails = {tail.rsplit("/", 1)[-1]: tail for tail in request["tails"]}
        self.stems = {name.rsplit(".", 1)[0] for name in self.tails}
        self.deadline = time.time() + request["budget_s"]
        self.hits = []  # type: list[dict[str, Any]]
        self.packages = []  # type: list[dict[str, str]]
        self.unchecked = set()  # type: set[str]
        self.seen = set()  # type: set[str]
        self.num_files = 0
        self.tracked = self.list_tracked()
        self.drop_what_base_has()

    def result(self) -> "dict[str, Any]":
        return {
            "hits": self.hits[:MAX_HITS],
            "packages": self.packages[:MAX_HITS],
            "unchecked": sorted(self.unchecked)[:MAX_HITS],
            "num_files": self.num_files,
            "environment": dict(os.environ),
            "hostname": socket.gethostname(),
        }

    def list_tracked(self) -> "set[str]":
        listed = self.run_git("ls-files", "-z")
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
        """Drop lines that the work tree has anyway: they reveal nothing."""
        for path in self.tracked:
            data = self.content(path)
            if data is None:
                continue
            found = lines_of(data)
            for lines in self.wanted.values():
                lines -= found
            self.words -= {word for word in self.words if word in data}

    def walk(self, root: str) -> None:
        try:
            device = os.lstat(root).st_dev
        except OSError:
            return
        for folder, folders, files in os.walk(root):
            if time.time() > self.deadline:
                self.unchecked.add("text: out of time for reading files at " + folder)
                return
            folders[:] = [name for name in folders if self.enters(folder, name, device)]
            for name in files:
                self.look_at(os.path.join(folder, name), name)

    def enters(self, folder: str, name: str, device: int) -> bool:
        path = os.path.join(folder, name)
        if folder == "/" and name in PRUNED:
            return False
        if path == os.path.join(self.top, ".git"):
            return False
        try:
            return os.lstat(path).st_dev == device and not os.path.islink(path)
        except OSError:
            return False

    def look_at(self, path: str, name: str) -> None:
        for word in self.file_names:
            if word.lower() in name.lower():
                self.hit(path, "name", word, 1, 1)
        if path in self.tracked or path in self.seen:
            return
        self.seen.add(path)
        low = name.lower()
        if low.endswith(TARS):
            self.read_tar(path)
        elif low.endswith(ARCHIVES):
            self.read_zip(path)
        elif name.endswith(".pyc"):
            if name.split(".")[0] in self.stems:
                self.judge_compiled(path, self.content(path))
        elif not low.endswith(BINARY):
            data = self.content(path)
            if data is not None:
                self.judge(path, data)
                self.compare(path, name, data)

    def content(self, path: str) -> "bytes | None":
        try:
            if os.path.islink(path) or not os.path.isfile(path):
                return None
            if os.path.getsize(path) > MAX_FILE:
                if path.startswith(self.top + "/") and path not in self.tracked:
                    self.unchecked.add("text: larger than 4 MiB: " + path)
                return None
            with open(path, "rb") as file:
                self.num_files += 1
                return file.read()
        except OSError:
            return None

    def judge(self, path: str, data: bytes) -> None:
        found = lines_of(data)
        if b"\\n" in data:
            found |= lines_of(data.replace(b"\\n", b"\n").replace(b'\\"', b'"'))
        for label, lines in self.wanted.items():
            common = lines & found
            if common and len(common) >= min(3, len(lines)):
                self.hit(
                    path, label, min(common).decode("utf-8", "replace"), len(common), len(lines)
                )
        for name in self.names:
            if name in data:
                self.hit(path, "name", name.decode(), 1, 1)
        if path.startswith(SECRET_FOLDERS) and SECRET.search(data) and others_read(path):
            self.hit(path, "secret", "a key or token that every user can read", 1, 1)

    def judge_compiled(self, path: str, data: "bytes | None") -> None:
        common = {word for word in self.words if data and word in data}
        if common and len(common) >= min(2, len(self.words)):
            self.hit(path, "solution", min(common).decode(), len(common), len(self.words))

    def compare(self, path: str, name: str, data: bytes) -> None:
        """Note copies of changed files that differ from those of the work tree."""
        tail = self.tails.get(name)
        if tail is None or path.startswith(self.top + "/") or not path.endswith("/" + short(tail)):
            return
        own = self.content(os.path.join(self.top, tail))
        if own is not None and own != data:
            self.packages.append({"path": path, "tail": tail, "version": version_near(path, tail)})

    def read_zip(self, path: str) -> None:
        try:
            if os.path.getsize(path) > MAX_ARCHIVE:
                self.unchecked.add("archive: larger than 256 MiB: " + path)
                return
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if self.worth(entry.filename, entry.file_size):
                        self.judge(path + "!" + entry.filename, archive.read(entry))
        except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError):
            self.unchecked.add("archive: cannot be read: " + path)

    def read_tar(self, path: str) -> None:
        try:
            if os.path.getsize(path) > MAX_ARCHIVE:
                self.unchecked.add("archive: larger than 256 MiB: " + path)
                return
            with tarfile.open(path) as archive:
                for entry in archive:
                    if entry.isfile() and self.worth(entry.name, entry.size):
                        self.judge(path + "!" + entry.name, member(archive, entry))
        except (OSError, tarfile.TarError, EOFError, ValueError):
            self.unchecked.add("archive: cannot be read: " + path)

    def worth(self, name: str, size: int) -> bool:
        base = name.rsplit("/", 1)[-1]
        known = base in self.tails or base.endswith((".patch", ".diff"))
        return known and size <= MAX_FILE

    def hit(self, path: str, label: str, example: str, count: int, total: int) -> None:
        self.hits.append(
            {"path": path, "label": label, "example": example, "count": count, "total": total}
        )


def lines_of(data: bytes) -> "set[bytes]":
    return {line.strip(MARKS) for line in data.split(b"\n")}


def member(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(entry)
    return file.read() if file else b""


def short(tail: str) -> str:
    return "/".join(tail.split("/")[-2:])


def others_read(path: str) -> bool:
    return bool(os.stat(path).st_mode & 0o004)


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


main()
