"""Pulling images that lie, onto disks that are full, in processes that are killed."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swerl.images.manifest import IMAGE_TYPES, Manifest, sha256
from swerl.images.pull import PullOptions, pull
from swerl.images.store import Store
from tests.unit.images.layers import Entry, make_tar
from tests.unit.images.pulls import Bring, Make, Push, failure, leftovers


async def test_layer_that_cannot_be_unpacked_leaves_nothing(
    registry: Any, push: Push, bring: Bring, store: Store, make_image: Make
) -> None:
    tar = make_tar(Entry("../out"))
    blob = gzip.compress(tar)
    await push(forged(make_image("x"), blob, sha256(tar)), "swe/task")
    assert "leads out" in failure(await bring(f"{registry.host}/swe/task"))
    assert leftovers(store) == []
    assert not store.blob(sha256(blob)).exists()


def forged(image: Any, blob: bytes, *diff_ids: str) -> Any:
    """An image of one layer whose config says what it likes."""
    rootfs = {"type": "layers", "diff_ids": list(diff_ids)}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    entries = [
        {"mediaType": kind, "digest": sha256(data), "size": len(data)}
        for kind, data in (
            ("application/vnd.oci.image.config.v1+json", config),
            ("application/vnd.oci.image.layer.v1.tar+gzip", blob),
        )
    ]
    body = {"schemaVersion": 2, "mediaType": IMAGE_TYPES[0], "config": entries[0]}
    manifest = json.dumps({**body, "layers": entries[1:]}).encode()
    blobs = {sha256(data): data for data in (config, blob)}
    return type(image)(blobs, Manifest("forged", manifest, IMAGE_TYPES[0]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here: it takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("packed", [False, True], ids=["blob", "layer"])
async def test_full_disk_is_one_clear_error(
    registry: Any, push: Push, make_image: Make, small_disk: Path, packed: bool, tmp_path: Path
) -> None:
    text = "x" * 6_000_000 if packed else os.urandom(2_000_000).hex()
    await push(make_image(text), "swe/task")
    store = Store(small_disk / "store")
    options = PullOptions(docker_config=tmp_path / "none.json")
    done = await pull([f"{registry.host}/swe/task"], store, options=options)
    assert "no space is left" in failure(done)
    assert "images gc" in failure(done)
    assert leftovers(store) == []


PULL = """
import asyncio, sys
from pathlib import Path
from swerl.images.pull import pull
from swerl.images.store import Store
print("begun", flush=True)
done = asyncio.run(pull(sys.argv[2:], Store(Path(sys.argv[1]))))
sys.exit(any(each.error for each in done))
"""


def child(store: Store, *images: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PULL, str(store.root), *images]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


async def test_a_pull_killed_at_any_moment_continues(
    registry: Any, push: Push, make_image: Make, store: Store
) -> None:
    image = make_image(*(os.urandom(400_000).hex() for _ in range(6)))
    await push(image, "swe/task")
    name = f"{registry.host}/swe/task"
    for delay in range(6):
        process = child(store, name)
        assert process.stdout is not None
        process.stdout.readline()
        await asyncio.sleep(0.02 * delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert child(store, name).wait(30) == 0
    assert len(store.find(name).layers) == 6
    store.remove_leftovers()
    assert [*(store.root / "work").iterdir()] == []
