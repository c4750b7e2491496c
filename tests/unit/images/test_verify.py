"""Whatever is not as it was stored is found, named, and fetched again."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swerl.images.pull import PullOptions, pull
from swerl.images.store import Snapshot, Store
from swerl.images.verify import CheckedPart, repair, verify
from tests.unit.images.layers import Entry, add_image, hardlink

Push = Callable[..., Awaitable[None]]
Make = Callable[..., Any]
NAME = "docker.io/swe/task:latest"


@pytest.fixture
def options(tmp_path: Path) -> PullOptions:
    return PullOptions(docker_config=tmp_path / "none.json")


async def damaged(store: Store, **settings: Any) -> list[CheckedPart]:
    return [each for each in await verify(store, store.names(), **settings) if each.problem]


async def test_whole_image_has_no_damage(store: Store) -> None:
    add_image(store, NAME, [Entry("a", b"x"), Entry("d/.wh.gone"), Entry("d/.wh..wh..opq")])
    checked = await verify(store, store.names(), everything=True)
    assert [each.problem for each in checked] == [""] * 4


async def test_copies_of_files_below_are_read_too(store: Store) -> None:
    add_image(store, NAME, [Entry("a", b"x")], [hardlink("b", "a")])
    assert await damaged(store, everything=True) == []
    rot(store.find(NAME).layers[1] / "b")
    assert [each.problem for each in await damaged(store)] == ["has changed files: b"]


def rot(path: Path) -> None:
    """Change one byte and nothing else: no size, no time."""
    before = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda tree: rot(tree / "d/a"), "has changed files: d/a"),
        (lambda tree: (tree / "d/a").unlink(), "has changed files: d/a"),
        (lambda tree: (tree / "new").touch(), "has changed files: new"),
        (lambda tree: (tree / "d/a").chmod(0o777), "has changed files: d/a"),
        (lambda tree: (tree / "d/gone").unlink(), "has changed files: d/gone"),
        (lambda tree: os.removexattr(tree / "d", "user.overlay.opaque"), "has changed files: d"),
        (lambda tree: (tree.parent / "listing").write_text(""), "a changed listing"),
        (lambda tree: (tree.parent / "layer.json").unlink(), "is missing"),
        (lambda tree: (tree.parent / "layer.json").write_text("{"), "cannot be read"),
    ],
)
async def test_change_in_an_unpacked_layer_is_named(
    store: Store, harm: Callable[[Path], None], words: str
) -> None:
    layer = [Entry("d/a", b"x"), Entry("d/.wh.gone"), Entry("d/.wh..wh..opq")]
    add_image(store, NAME, layer)
    harm(next((store.root / "layers").iterdir()) / "tree")
    (found,) = await damaged(store)
    assert words in found.problem
    assert found.part.images == (NAME,)


async def test_every_kind_of_blob_is_checked(store: Store) -> None:
    for which in range(3):
        add_image(store, NAME, [Entry("a", os.urandom(5))])
        manifest = store.manifest(store.named(NAME))
        blobs = [manifest.digest, manifest.config().digest, manifest.layers()[0].digest]
        rot(store.blob(blobs[which]))
        (found,) = await damaged(store)
        assert found.part.digest == blobs[which]
        assert "has a different digest" in found.problem


async def test_a_short_blob_is_reported_without_reading_it(store: Store) -> None:
    add_image(store, NAME, [Entry("a")])
    blob = store.manifest(store.named(NAME)).layers()[0]
    os.truncate(store.blob(blob.digest), 3)
    (found,) = await damaged(store)
    assert (found.problem, found.num_bytes) == (f"has 3 bytes instead of {blob.size}", 0)


async def test_damage_that_no_image_needs_is_found_on_request(
    store: Store, options: PullOptions
) -> None:
    add_image(store, NAME, [Entry("a")])
    orphan = store.blob(store.put(b"orphan"))
    orphan.write_bytes(b"other!")
    assert await damaged(store) == []
    found = await damaged(store, everything=True)
    assert [each.part.images for each in found] == [()]
    await repair(store, found, options)
    assert not orphan.exists()


@pytest.mark.parametrize("which", ["manifest", "config", "blob", "layer", "listing"])
async def test_damaged_part_is_fetched_again(
    registry: Any, push: Push, make_image: Make, store: Store, options: PullOptions, which: str
) -> None:
    image, name = make_image("a", "b"), f"{registry.host}/swe/task"
    await push(image, "swe/task")
    await pull([name], store, options=options)
    manifest = store.manifest(store.named(name))
    layer = store.config(manifest).diff_ids[0]
    harmed = {
        "manifest": store.blob(manifest.digest),
        "config": store.blob(manifest.config().digest),
        "blob": store.blob(manifest.layers()[0].digest),
        "layer": store.layer_tree(layer) / "etc/motd",
        "listing": store.layer(layer) / "listing",
    }[which]
    whole = harmed.read_bytes()
    rot(harmed)
    await push(make_image("moved tag"), "swe/task")
    found = await damaged(store)
    done = await repair(store, found, options)
    assert [each.error for each in done.pulled] == [None]
    assert await damaged(store, everything=True) == []
    assert harmed.read_bytes() == whole


async def test_repair_finds_a_mirror_by_rewrite(
    faulty: Any, registry: Any, push: Push, make_image: Make, store: Store, tmp_path: Path
) -> None:
    await push(make_image("a"), "swe/task")
    name = f"{faulty.host}/swe/task"
    await pull([name], store)
    rot(store.blob(store.named(name).digest))
    asked = len(faulty.asked)
    options = PullOptions(
        rewrites={faulty.host: registry.host}, docker_config=tmp_path / "none.json"
    )
    await repair(store, await damaged(store), options)
    assert await damaged(store) == []
    assert len(faulty.asked) == asked


async def test_layer_of_an_open_sandbox_is_left_alone(
    registry: Any, push: Push, make_image: Make, store: Store, options: PullOptions
) -> None:
    await push(make_image("a"), "swe/task")
    name = f"{registry.host}/swe/task"
    await pull([name], store, options=options)
    with store.use(name) as image:
        (image.layers[0] / "new").touch()
        done = await repair(store, await damaged(store), options)
        assert len(done.in_use) == 1
        assert (image.layers[0] / "new").exists()
    await repair(store, await damaged(store), options)
    assert await damaged(store) == []


async def test_imported_image_must_be_imported_again(store: Store, options: PullOptions) -> None:
    add_image(store, NAME, [Entry("a")])
    rot(store.blob(store.named(NAME).digest))
    done = await repair(store, await damaged(store), options)
    assert (done.lost, list(done.pulled)) == ([NAME], [])


async def test_a_snapshot_is_checked_and_removed_like_a_layer(
    store: Store, options: PullOptions
) -> None:
    add_image(store, NAME, [Entry("a")])
    digest, key = store.named(NAME).digest, f"sha256:{'5' * 64}"
    with store.owner().scratch() as folder:
        (folder / "tree").mkdir()
        (folder / "tree" / "new").write_text("of a sandbox")
        store.add_snapshot(folder, key, Snapshot(NAME, digest, digest))
    assert await damaged(store) == []
    rot(store.layer(key) / "tree" / "new")
    (found,) = await damaged(store)
    assert (found.part.digest, found.part.images) == (key, (NAME,))
    assert found.problem == "has changed files: new"
    await repair(store, [found], options)
    assert not store.has_layer(key)
    assert await damaged(store) == []
