"""A hostile tree gives a snapshot its own files alone, within bounds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError
from swerl.core.sandbox import Limits
from swerl.images.layer_copy import copy_changes
from swerl.images.store import default_store
from swerl.sandboxes import local

LIMITS = Limits(memory_mib=256, disk_mib=64, num_processes=64)
SECRET = "root's own"
NAMES = ("count.0", "count.1000")
DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
fd = os.open("/work/count." + str(os.getuid()), os.O_RDWR | os.O_CREAT)
while True:
    os.pwrite(fd, b"%020d" % time.time_ns(), 0)
"""


def copy(source: Path, dest: Path, *, max_bytes: int = 1 << 20) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        copy_changes(fd, dest, max_bytes=max_bytes, stop=threading.Event())
    finally:
        os.close(fd)


def test_a_folder_swapped_for_a_link_leads_nowhere(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    for folder in (outside, tree):
        folder.mkdir()
    for number in range(40):
        (tree / f"{number}").mkdir()
        (tree / f"{number}" / "secret").write_text("mine")
        (tree / f"{number}.link").symlink_to(outside)
    (outside / "secret").write_text(SECRET)
    libc, done = ctypes.CDLL(None), threading.Event()

    def swap() -> None:
        while not done.is_set():
            for number in range(40):
                names = (os.fsencode(tree / f"{number}{end}") for end in ("", ".link"))
                first, second = names
                libc.renameat2(-100, first, -100, second, 2)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(10):
            try:
                copy(tree, tmp_path / f"copy{number}")
            except OSError:
                continue
            for path in (tmp_path / f"copy{number}").iterdir():
                assert path.is_symlink() or (path / "secret").read_text() == "mine"
    finally:
        done.set()
        thread.join()


def test_a_copy_equals_its_source_without_set_user_ids(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "folder").mkdir(parents=True)
    (tree / "folder" / "program").write_bytes(b"x")
    (tree / "folder" / "program").chmod(0o6755)
    (tree / "sparse").write_bytes(b"a")
    os.truncate(tree / "sparse", 500_000)
    os.link(tree / "sparse", tree / "other")
    (tree / "link").symlink_to("/etc/passwd")
    os.mkfifo(tree / "pipe")
    os.mknod(tree / "gone", stat.S_IFCHR | 0o600, 0)
    os.utime(tree / "folder", ns=(1, 2))
    copy(tree, tmp_path / "copy")
    found = {path.name: path.lstat() for path in (tmp_path / "copy").rglob("*")}
    assert stat.S_IMODE(found["program"].st_mode) == 0o755
    assert found["folder"].st_mtime_ns == 2
    assert found["sparse"].st_ino == found["other"].st_ino
    assert found["sparse"].st_size == 500_000
    assert stat.S_ISLNK(found["link"].st_mode) and stat.S_ISFIFO(found["pipe"].st_mode)
    assert stat.S_ISCHR(found["gone"].st_mode)


def test_holes_count(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").touch()
    os.truncate(tree / "f", 15 << 40)
    with pytest.raises(OSError, match="holes included"):
        copy(tree, tmp_path / "copy")


async def test_a_sparse_file_is_no_snapshot_and_costs_no_time(backend: local.LocalBackend) -> None:
    folder = default_store().root
    async with backend.open("dir:" + str(empty(folder)), LIMITS, workdir="/work") as sandbox:
        assert (await sandbox.run(["truncate", "-s", "15T", "f"])).exit_code == 0
        started = time.monotonic()
        with pytest.raises(SandboxError, match="holes included"):
            await sandbox.snapshot("sparse")
        assert time.monotonic() - started < 20
        assert (await sandbox.run(["echo", "alive"])).text == "alive\n"


async def test_everything_inside_stands_still_meanwhile(
    backend: local.LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[list[str]] = []

    def copy_slowly(source: int, dest: Path, **_: object) -> dict[bytes, str]:
        dest.mkdir()
        for _ in range(2):
            time.sleep(0.3)
            counts.append([])
            for name in NAMES:
                fd = os.open(name, os.O_RDONLY, dir_fd=source)
                counts[-1].append(os.read(fd, 100).decode())
                os.close(fd)
        return {}

    monkeypatch.setattr("swerl.sandboxes._local.sandbox.copy_changes", copy_slowly)
    image = "dir:" + str(empty(tmp_path))
    async with backend.open(image, LIMITS, workdir="/work") as sandbox:
        for user in ("agent", "root"):  # the name of a process proves nothing
            await sandbox.run(["python3", "-c", DAEMON, "SWERL_JOB"], user=user)
        await asyncio.sleep(0.3)
        await sandbox.capture(tmp_path / "copy")
        assert counts[0] == counts[1]
        await asyncio.sleep(0.3)
        for name, count in zip(NAMES, counts[0], strict=True):
            assert (await sandbox.run(["cat", name])).text != count


def empty(folder: Path) -> Path:
    path = folder / "empty"
    path.mkdir(parents=True, exist_ok=True)
    return path
