"""What nobody needs goes, and never what somebody uses."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swerl.core.errors import ImageError
from swerl.images.gc import collect
from swerl.images.store import Named, Snapshot, Store
from tests.unit.images.layers import Entry, add_image


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three images of 1,000 bytes over a base of 5,000."""
    made = Store(tmp_path / "store")
    for number, name in enumerate("abc"):
        reference = f"docker.io/swe/{name}:latest"
        layers = [Entry("base", bytes(5000))], [Entry(name, name.encode() * 1000)]
        digest = add_image(made, reference, *layers)
        made.name(Named(reference, digest, pulled_unix_s=float(number)))
    return made


def there(store: Store) -> str:
    """The images that are in the store and ready."""
    found = ""
    for name in "abc":
        try:
            store.find(f"swe/{name}")
        except ImageError:
            continue
        found += name
    return found


def disk(store: Store) -> int:
    """Bytes of blobs and of files in layers."""
    folders = (store.root / "blobs", *(store.root / "layers").glob("*/tree"))
    return sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file())


def test_unneeded_images_are_removed(store: Store) -> None:
    before = disk(store)
    done = collect(store, ["swe/b"])
    assert there(store) == "b"
    assert before - disk(store) == done.freed_bytes > 2000
    assert done.kept_bytes == disk(store)
    assert [*(store.root / "work").iterdir()] == []


def test_shared_layer_stays_with_the_last_image_that_needs_it(store: Store) -> None:
    (base,) = {store.find(f"swe/{name}").layers[0] for name in "abc"}
    collect(store, ["swe/c"])
    assert base.is_dir()
    collect(store, [])
    assert not base.exists()
    assert disk(store) == 0


def test_dry_run_changes_nothing(store: Store) -> None:
    before = disk(store)
    done = collect(store, [], dry_run=True)
    assert (len(done.removed), done.freed_bytes) == (3, before)
    assert (disk(store), there(store)) == (before, "abc")


USE = """
import sys, time
from pathlib import Path
from swerl.images.store import Store
with Store(Path(sys.argv[1])).use("swe/b"):
    print("using", flush=True)
    time.sleep(60)
"""


def test_image_that_another_process_uses_stays_until_it_dies(store: Store) -> None:
    argv = [sys.executable, "-c", USE, str(store.root)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        result = collect(store, [])
        assert there(store) == "b"
        assert [name.reference for name in result.in_use] == ["docker.io/swe/b:latest"]
        process.kill()
        process.wait()
    collect(store, [])
    assert there(store) == ""


def test_parts_of_no_image_go(store: Store) -> None:
    orphan = store.blob(store.put(b"orphan"))
    done = collect(store, ["swe/a", "swe/b", "swe/c"])
    assert (done.num_parts, orphan.exists()) == (1, False)
    assert there(store) == "abc"


def test_part_that_a_pull_is_bringing_stays(store: Store) -> None:
    digest = store.put(b"half an image")
    with store.using([digest]):
        collect(store, [])
        assert store.blob(digest).exists()


def test_a_snapshot_goes_with_its_image_or_when_it_is_unused(store: Store) -> None:
    digests = {named.reference: named.digest for named in store.names()}
    for name, days in (("a", 0), ("b", 0), ("b", 40)):
        layer_id = f"sha256:{hashlib.sha256(f'{name}{days}'.encode()).hexdigest()}"
        digest = digests[f"docker.io/swe/{name}:latest"]
        with store.scratch() as folder:
            (folder / "tree").mkdir()
            (folder / "tree/new").write_text("changed")
            store.add_snapshot(folder, layer_id, Snapshot(f"swe/{name}", digest, digest))
        note = store.layer(layer_id) / "layer.json"
        os.utime(note, (time.time() - days * 86_400,) * 2)
    collect(store, ["swe/b"])
    assert [found.base for found in store.snapshots().values()] == ["swe/b"]
