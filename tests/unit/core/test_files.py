"""Unpacking, by Python's own filters and by those of the backport."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from swerl.core.files import unpack_tarball


@pytest.fixture(params=["own", "backport"], autouse=True)
def filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "backport":
        pytest.importorskip("backports.tarfile")
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no filters of its own")


def packed(folder: Path, files: Mapping[str, bytes], *links: tuple[str, str]) -> Path:
    path = folder / "some.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


def test_files_come_out_whole(tmp_path: Path) -> None:
    unpack_tarball(packed(tmp_path, {"a/b": b"x", "a/c": b"y"}), tmp_path / "out")
    assert (tmp_path / "out/a/b").read_bytes() == b"x"
    assert (tmp_path / "out/a/c").stat().st_mode & 0o111 == 0


def test_some_are_kept_and_some_may_be_executed(tmp_path: Path) -> None:
    tarball = packed(tmp_path, {"bin/run": b"x", "docs/page": b"y"})
    unpack_tarball(tarball, tmp_path / "out", keep="bin/.*", programs="bin/run")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bin"]
    assert (tmp_path / "out/bin/run").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("files", "links"),
    [
        ({"../outside": b"x"}, []),
        ({"a/../../outside": b"x"}, []),
        ({}, [("link", "../../elsewhere")]),
    ],
)
def test_nothing_comes_to_lie_outside(
    tmp_path: Path, files: dict[str, bytes], links: list[tuple[str, str]]
) -> None:
    with pytest.raises(ValueError, match=r"some\.tar\.gz"):
        unpack_tarball(packed(tmp_path, files, *links), tmp_path / "out")
    assert not (tmp_path / "outside").exists()


def test_what_is_no_tarball_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "some.tar.gz").write_bytes(b"no tarball")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack_tarball(tmp_path / "some.tar.gz", tmp_path / "out")
