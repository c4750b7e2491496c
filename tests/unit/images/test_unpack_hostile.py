"""Layers that attack: no name, link or size of theirs does harm."""

from __future__ import annotations

import gzip
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from swerl.core.errors import ImageError
from swerl.images import unpack as unpacking
from swerl.images.manifest import sha256
from swerl.images.unpack import unpack
from tests.unit.images.layers import Entry, folder, hardlink, layer_file, make_tar, symlink

Run = Callable[..., int]


def test_hard_link_to_the_outside_is_refused(run: Run, tree: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    with pytest.raises(ImageError):
        run(symlink("a", str(tmp_path)), hardlink("b", "a/secret"))
    with pytest.raises(ImageError):
        run(hardlink("c", str(secret)))
    assert secret.stat().st_nlink == 1


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([hardlink("b", "usr/bin/git")], "No such file"),
        ([symlink("a", "b"), folder("b"), Entry("a/f")], "Not a directory"),
        ([folder("b"), Entry("b")], "replaces a folder"),
        ([folder("b"), hardlink("c", "b")], "links a folder"),
        ([Entry("/".join(["d"] * 300))], "too deep"),
        ([Entry("../out")], "leads out"),
        ([Entry("a/../../out")], "leads out"),
        ([Entry("a/..")], "leads out"),
    ],
)
def test_inconsistent_layer_is_one_clear_error(run: Run, entries: list[Entry], words: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        run(*entries)
    assert caught.value.hint


def test_hard_link_to_a_link_links_the_link(run: Run, tree: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    run(symlink("a", str(secret)), hardlink("b", "a"), Entry("b", b"over"))
    assert secret.read_text() == "s"


@pytest.mark.parametrize("size", [2 << 20, 1 << 40])
def test_header_of_many_bytes_is_not_read(tmp_path: Path, tree: Path, size: int) -> None:
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.XHDTYPE, size
    tar = info.tobuf(tarfile.GNU_FORMAT) + bytes(4096)
    (tmp_path / "layer").write_bytes(tar)
    with pytest.raises(ImageError, match="not a tar archive"):
        unpack(tmp_path / "layer", tree, sha256(tar))


@pytest.mark.parametrize("packer", ["gzip", "zstd", "gzip twice"])
def test_bomb_is_stopped_early(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, packer: str
) -> None:
    monkeypatch.setattr(unpacking, "BOMB_FLOOR", 1 << 20)
    tar = make_tar(Entry("zeros", bytes(64 << 20)))
    if packer == "zstd":
        reason = "the package zstandard is not installed"
        packed = pytest.importorskip("zstandard", reason=reason).compress(tar)
    else:
        packed = gzip.compress(tar)
    if packer == "gzip twice":  # the inner one is the content of a file
        tar = make_tar(*(Entry(f"{number}.gz", packed) for number in range(64)))
        packed = gzip.compress(tar)
    (tmp_path / "bomb").write_bytes(packed)
    with pytest.raises(ImageError, match="more than"):
        unpack(tmp_path / "bomb", tree, sha256(tar))
    assert sum(path.stat().st_size for path in tree.rglob("*")) < 20 << 20


def test_sparse_bomb_is_refused(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2 << 40)
    subprocess.run(["tar", "--sparse", "-cf", "layer.tar", "huge"], cwd=tmp_path)
    layer = tmp_path / "layer.tar"
    with pytest.raises(ImageError, match="more than"):
        unpack(layer, tree, sha256(layer.read_bytes()))


BELOW = [
    Entry("a/f", b"x"), folder("a/d", 0o777), symlink("a/s", "f"), hardlink("a/h", "own"),
    Entry("a/p", kind=tarfile.FIFOTYPE), Entry("a/.wh.there"), Entry("a/.wh..wh..opq"),
    Entry("a/there", b"over"), folder("a/there", 0o777), Entry("a/in/.wh.there"),
]  # fmt: skip


@pytest.mark.parametrize("entry", BELOW, ids=lambda entry: f"{entry.kind!r} {entry.name}")
def test_nothing_is_made_or_removed_below_a_link_that_leads_out(
    run: Run, tree: Path, tmp_path: Path, entry: Entry
) -> None:
    out = outside(tmp_path)
    before = shown(out)
    with pytest.raises(ImageError, match="cannot be unpacked"):
        run(symlink("a", str(out)), Entry("own", b"own"), entry)
    assert shown(out) == before


def outside(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    (out / "in").mkdir(parents=True)
    for path in (out / "there", out / "in" / "there"):
        path.write_text("kept")
    return out


def shown(folder: Path) -> list[tuple[str, int, int, int, bytes]]:
    """Return all that a layer could change of a folder."""
    found = []
    for path in sorted([folder, *folder.rglob("*")]):
        at = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found.append((str(path), at.st_mode, at.st_nlink, at.st_mtime_ns, data))
    return found


def test_random_layers_change_nothing_outside_and_fail_by_one_error(
    tmp_path: Path, tree: Path
) -> None:
    random, out = Random(0), outside(tmp_path)
    before, refused, made = shown(out), 0, 0
    parts = ["a", "b", "c", "there", "in", "..", ".", "", ".wh.a", ".wh.there", ".wh..wh..opq"]
    targets = ["a", "b/c", "..", "../..", "/", ".", str(out), str(out / "there"), "../out/there"]
    kinds = [tarfile.REGTYPE] * 3 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
    kinds += [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    weights = [6] * 5 + [1] * 6
    for number in range(600):
        entries = []
        for _ in range(random.randrange(1, 9)):
            name = "/".join(random.choices(parts, weights, k=random.randrange(1, 4)))
            kind, link = random.choice(kinds), random.choice(targets)
            data = b"over" if kind == tarfile.REGTYPE else b""
            entries.append(Entry(name or "a", data, kind, link, random.choice([0o644, 0o777, 0])))
        into = tree / str(number)
        into.mkdir()
        file, diff_id = layer_file(tmp_path / "layer", *entries)
        try:
            unpack(file, into, diff_id)
            made += 1
        except ImageError as error:
            assert str(error)
            refused += 1
        assert shown(out) == before, entries
    assert min(refused, made) > 50
    assert len([*tree.iterdir()]) == 600
