"""The store: images found by any name, whole or not at all, whoever writes and dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swerl.core.errors import ImageError
from swerl.images.store import Store
from tests.unit.images.layers import Entry, add_image

NAME = "docker.io/swe/task:latest"


def test_image_is_found_by_every_name_it_has(store: Store) -> None:
    digest = add_image(store, NAME, [Entry("a")])
    for name in ("swe/task", "swe/task:latest", NAME, f"swe/task@{digest}", f"swe/task:1@{digest}"):
        assert store.find(name).digest == digest


def test_found_image_is_ready_for_a_sandbox(store: Store) -> None:
    config = {"Env": ["PATH=/bin", "A=b=c"]}
    add_image(store, NAME, [Entry("a", b"low")], [Entry("a", b"high")], config=config)
    found = store.find("swe/task")
    assert [(layer / "a").read_bytes() for layer in found.layers] == [b"low", b"high"]
    assert found.env == {"PATH": "/bin", "A": "b=c"}
    assert found.size == 7


def test_layer_that_comes_twice_counts_at_its_highest_place(store: Store) -> None:
    add_image(store, NAME, [Entry("a", b"1")], [Entry("a", b"2")], [Entry("a", b"1")])
    assert [(layer / "a").read_bytes() for layer in store.find(NAME).layers] == [b"2", b"1"]


@pytest.mark.parametrize("lost", ["layer", "config", "manifest"])
def test_image_with_a_part_missing_is_not_found(store: Store, lost: str) -> None:
    digest = add_image(store, NAME, [Entry("a")])
    manifest = store.manifest(store.named(NAME))
    config = store.config(manifest)
    {
        "layer": store.layer(config.diff_ids[0]) / "layer.json",
        "config": store.blob(manifest.config().digest),
        "manifest": store.blob(digest),
    }[lost].unlink()
    with pytest.raises(ImageError, match="lacks") as caught:
        store.find(NAME)
    assert "images pull" in caught.value.hint


@pytest.mark.parametrize("rotten", ["config", "manifest"])
def test_damaged_document_is_not_believed(store: Store, rotten: str) -> None:
    digest = add_image(store, NAME, [Entry("a")], config={"Env": ["A=good"]})
    config = store.manifest(store.named(NAME)).config().digest
    path = store.blob(config if rotten == "config" else digest)
    path.write_bytes(path.read_bytes().replace(b"A=good", b"A=evil").replace(b": 2", b": 3"))
    with pytest.raises(ImageError, match="is damaged") as caught:
        store.find(NAME)
    assert "images pull" in caught.value.hint


def test_only_its_owner_may_look_into_the_store(store: Store) -> None:
    add_image(store, NAME, [Entry("a")])
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_store_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "store")
    for act in (
        store.scratch().__enter__,
        lambda: store.put(b"x"),
        lambda: add_image(store, NAME, []),
    ):
        with pytest.raises(ImageError, match="cannot write the image store") as caught:
            act()
        assert "SWERL_CACHE" in caught.value.hint


# Processes that share a store

ADD = """
import sys
from pathlib import Path
from tests.unit.images.layers import Entry, add_image
from swerl.images.store import Store
store = Store(Path(sys.argv[1]))
print("begun", flush=True)
for number in range(int(sys.argv[2])):
    layers = [[Entry(f"{n}/{number}", bytes(2000)) for n in range(50)], [Entry("own")]]
    add_image(store, f"docker.io/swe/task{number}:latest", *layers)
"""


def child(store: Store, program: str, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", program, str(store.root), *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_may_write_the_same_images_at_once(store: Store) -> None:
    children = [child(store, ADD, "10") for _ in range(3)]
    assert [each.wait(60) for each in children] == [0, 0, 0]
    for number in range(10):
        assert len(store.find(f"swe/task{number}").layers) == 2
    assert list((store.root / "work").iterdir()) == []


def test_writer_killed_at_any_moment_leaves_a_store_that_works(store: Store) -> None:
    for delay in range(8):
        process = child(store, ADD, "1000")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.01 * delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    for named in store.names():
        store.find(named.reference)
    store.remove_leftovers()
    assert list((store.root / "work").iterdir()) == []
    add_image(store, NAME, [Entry("a")])
    assert store.find(NAME)


def test_remove_leftovers_keeps_the_files_of_living_processes(store: Store) -> None:
    with store.scratch() as folder:
        assert Store(store.root).remove_leftovers() == 0
        assert folder.is_dir()
