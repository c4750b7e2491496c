"""A layer's hard links may lead to files of the layers below it, which then are copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.core.errors import ImageError
from swerl.images import unpack as unpacking
from swerl.images.manifest import sha256
from swerl.images.store import Store
from swerl.images.unpack import LinksBelowError, Unpacked, unpack
from tests.unit.images.layers import (
    Entry,
    add_image,
    folder,
    hardlink,
    layer_file,
    make_tar,
    symlink,
)

Run = Callable[..., Unpacked]


@pytest.fixture
def low(tmp_path: Path) -> Path:
    """The layer below."""
    path = tmp_path / "low"
    path.mkdir()
    file, diff_id = layer_file(
        tmp_path / "low.tar.gz",
        folder("usr/bin", 0o700), Entry("usr/bin/git", b"program", mode=0o755, mtime=7),
        symlink("bin", "/usr/bin"), symlink("loop", "loop"), symlink("usr/bin/g", "git"),
    )  # fmt: skip
    unpack(file, path, diff_id)
    return path


@pytest.fixture
def run(tmp_path: Path, tree: Path, low: Path) -> Run:
    """Unpack a layer of these entries over the one below."""

    def call(*entries: Entry) -> Unpacked:
        file, diff_id = layer_file(tmp_path / "layer.tar.gz", *entries)
        return unpack(file, tree, diff_id, below=[low])

    return call


def test_the_file_is_copied_with_mode_and_time(run: Run, tree: Path, low: Path) -> None:
    done = run(hardlink("git", "usr/bin/git"))
    copy = tree / "git"
    assert copy.read_bytes() == b"program"
    assert (copy.stat().st_mode & 0o777, copy.stat().st_mtime) == (0o755, 7)
    assert (done.has_copies, done.num_bytes) == (True, 7)
    assert (low / "usr/bin/git").stat().st_nlink == 1
    assert [path.name for path in tree.iterdir()] == ["git"]  # no folder that would hide the other


def test_links_on_the_way_are_followed_within_the_image(run: Run, tree: Path) -> None:
    run(hardlink("a", "bin/git"), symlink("own", "../bin"), hardlink("b", "own/git"))
    assert (tree / "a").read_bytes() == (tree / "b").read_bytes() == b"program"


def test_names_of_one_file_share_one_copy(run: Run, tree: Path) -> None:
    run(hardlink("a", "usr/bin/git"), hardlink("b", "bin/git"), hardlink("c", "b"))
    assert (tree / "a").stat().st_nlink == 3


def test_an_overwritten_copy_is_made_again(run: Run, tree: Path) -> None:
    run(hardlink("a", "usr/bin/git"), Entry("a", b"other"), hardlink("b", "usr/bin/git"))
    assert ((tree / "a").read_bytes(), (tree / "b").read_bytes()) == (b"other", b"program")


def test_link_to_a_link_copies_the_link(run: Run, tree: Path) -> None:
    run(hardlink("a", "usr/bin/g"))
    assert (tree / "a").readlink() == Path("git")


def test_own_file_comes_before_one_below(run: Run, tree: Path) -> None:
    done = run(Entry("usr/bin/git", b"own"), hardlink("a", "usr/bin/git"))
    assert ((tree / "a").read_bytes(), done.has_copies) == (b"own", False)


@pytest.mark.parametrize(
    "before",
    [
        [Entry("usr/bin/.wh.git")],
        [Entry(".wh.usr")],
        [folder("usr"), Entry("usr/.wh..wh..opq")],
        [Entry("usr", b"a file hides the folder")],
    ],
)
def test_a_hidden_file_cannot_be_linked(run: Run, before: list[Entry]) -> None:
    with pytest.raises(LinksBelowError, match="usr/bin/git"):
        run(*before, hardlink("a", "usr/bin/git"))


def test_nothing_outside_the_layers_is_linked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    for target in ("out/secret", f"{tmp_path}/secret"):
        with pytest.raises(LinksBelowError):
            run(symlink("out", f"{tmp_path}"), hardlink("a", target))
    with pytest.raises(ImageError, match="circle"):
        run(hardlink("a", "loop/git"))


def test_folder_below_cannot_be_linked(run: Run) -> None:
    with pytest.raises(ImageError, match="links a folder"):
        run(hardlink("a", "usr/bin"))


def test_copies_count_towards_the_bomb(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "BOMB_FLOOR", 20)
    monkeypatch.setattr(unpacking, "BOMB_RATIO", 0)
    monkeypatch.setattr(unpacking, "LayerStream", _unbounded(unpacking.LayerStream))
    again = [hardlink("a", "usr/bin/git"), hardlink("k", "a"), Entry("a")]
    with pytest.raises(ImageError, match="a layer's files take more"):
        run(*again * 4)


def test_store_keeps_the_layer_apart_for_each_image(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    high = [hardlink("b", "a")]
    images = {"docker.io/a/one:1": b"1", "docker.io/a/two:1": b"2", "docker.io/a/again:1": b"1"}
    for name, text in images.items():
        add_image(store, name, [Entry("a", text)], high)
    one, two, again = (store.find(name).layers for name in images)
    assert [(layers[1] / "b").read_bytes() for layers in (one, two)] == [b"1", b"2"]
    assert one == again
    assert not store.has_layer(sha256(make_tar(*high)))


def _unbounded(stream: type) -> Callable[..., object]:
    return lambda file, *, max_bytes, stop: stream(file, max_bytes=1 << 30, stop=stop)
