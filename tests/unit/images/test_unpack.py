"""Layers become overlayfs folders, and nothing in them reaches outside."""

from __future__ import annotations

import gzip
import io
import os
import resource
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.core.errors import ImageError
from swerl.images.manifest import sha256
from swerl.images.unpack import unpack
from tests.unit.images.layers import Entry, folder, layer_file, make_tar

Run = Callable[..., int]


def is_opaque(path: Path) -> bool:
    return os.getxattr(path, "user.overlay.opaque") == b"y"


def test_files_keep_content_mode_and_time(run: Run, tree: Path) -> None:
    done = run(folder("bin", 0o711), Entry("bin/a", b"x" * 3_000_000, mode=0o755), Entry("b"))
    found = (tree / "bin/a").stat()
    assert (tree / "bin/a").read_bytes() == b"x" * 3_000_000
    assert (found.st_mode & 0o7777, found.st_mtime) == (0o755, 1_000_000_000)
    assert (tree / "bin").stat().st_mode & 0o7777 == 0o711
    assert (tree / "bin").stat().st_mtime == 1_000_000_000
    assert done == 3_000_000


def test_set_user_id_is_dropped(run: Run, tree: Path) -> None:
    run(Entry("su", mode=0o6755), folder("shared", 0o3777))
    assert (tree / "su").stat().st_mode & 0o7777 == 0o755
    assert (tree / "shared").stat().st_mode & 0o7777 == 0o1777


def test_names_of_any_bytes_and_any_length(run: Run, tree: Path) -> None:
    names = ["täst", "new\nline", "bad\udcff", "a" * 200 + "/" + "b" * 200]
    run(*(Entry(name, name.encode("utf-8", "surrogateescape")) for name in names))
    for name in names:
        raw = name.encode("utf-8", "surrogateescape")
        assert (tree / os.fsdecode(raw)).read_bytes() == raw


def test_whiteout_becomes_a_device_and_opaque_an_attribute(run: Run, tree: Path) -> None:
    run(folder("d"), Entry("d/.wh.gone"), folder("new"), Entry("new/.wh..wh..opq"))
    gone = (tree / "d/gone").lstat()
    assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
    assert is_opaque(tree / "new")
    assert sorted(path.name for path in tree.rglob("*")) == ["d", "gone", "new"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_folder_removed_and_made_again_hides_the_one_below(
    run: Run, tree: Path, order: int
) -> None:
    run(*(Entry(".wh.d"), Entry("d/f", b"new"))[::order])
    assert (tree / "d/f").read_bytes() == b"new"
    assert is_opaque(tree / "d")


def test_sparse_file_is_filled(tmp_path: Path, tree: Path) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as file:
        file.seek(8 << 20)
        file.write(b"end")
        file.truncate(16 << 20)
    layer = tmp_path / "layer.tar"
    subprocess.run(["tar", "--sparse", "--format=gnu", "-cf", "layer.tar", "sparse"], cwd=tmp_path)
    unpack(layer, tree, sha256(layer.read_bytes()))
    assert (tree / "sparse").read_bytes() == source.read_bytes()


def test_devices_and_attributes_are_left_out(run: Run, tree: Path) -> None:
    forged = [("SCHILY.xattr.trusted.overlay.redirect", "/etc"), ("SCHILY.xattr.user.a", "b")]
    run(
        Entry("null", kind=tarfile.CHRTYPE), Entry("disk", kind=tarfile.BLKTYPE),
        Entry("f", b"x", pax=forged), Entry("pipe", kind=tarfile.FIFOTYPE),
    )  # fmt: skip
    assert sorted(path.name for path in tree.iterdir()) == ["f", "pipe"]
    assert os.listxattr(tree / "f") == []


# Layers that attack


def test_other_content_than_the_config_says_is_refused(tmp_path: Path, tree: Path) -> None:
    file, _ = layer_file(tmp_path / "layer", Entry("a"))
    with pytest.raises(ImageError, match="unpacks to sha256"):
        unpack(file, tree, sha256(b"other"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: data[:50] + b"\xff" * 20 + data[70:], "damaged"),
        (lambda data: data + b"rubbish", "damaged"),
        (lambda data: b"rubbish" * 1000, "not a tar archive"),
        (lambda data: gzip.compress(b"rubbish" * 1000), "not a tar archive"),
    ],
    ids=["half", "bits", "rest", "rubbish", "packed rubbish"],
)
def test_damage_is_one_clear_error(
    tmp_path: Path, tree: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    file, diff_id = layer_file(tmp_path / "layer", Entry("a", os.urandom(5000)))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ImageError, match=words) as caught:
        unpack(file, tree, diff_id)
    assert caught.value.hint


def test_zstd_and_plain_layers_are_understood(tmp_path: Path, tree: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    tar = make_tar(Entry("a", b"x" * 100_000))
    for number, data in enumerate((tar, zstandard.compress(tar))):
        into = tree / str(number)
        into.mkdir()
        (tmp_path / "layer").write_bytes(data)
        unpack(tmp_path / "layer", into, sha256(tar))
        assert (into / "a").read_bytes() == b"x" * 100_000


def test_many_folders_leave_no_descriptor_open(run: Run) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    run(*(Entry(f"{number}/deep/er/f") for number in range(300)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_memory_stays_bounded(tmp_path: Path, tree: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = 200 << 20
        tar.addfile(info, _Zeros())
    (tmp_path / "layer").write_bytes(gzip.compress(out.getvalue(), 1))
    diff_id = sha256(out.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unpack(tmp_path / "layer", tree, diff_id)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


class _Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return bytes(size)
