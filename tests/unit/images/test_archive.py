"""OCI layouts, as the tools write them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import ImageError, InputError
from swerl.images.archive import import_image
from swerl.images.manifest import INDEX_TYPES, sha256
from swerl.images.store import Store
from tests.unit.images.layers import Entry, Make, Push, make_tar


@pytest.mark.parametrize("kind", ["oci", "oci-archive"])
async def test_the_output_of_skopeo_is_imported(
    registry: Any, push: Push, make_image: Make, tmp_path: Path, store: Store, kind: str
) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed (apt-get install skopeo)")
    await push(make_image("a", "b"), "swe/task", "v1")
    path, source = tmp_path / "out", f"docker://{registry.host}/swe/task:v1"
    argv = ["skopeo", "copy", "-q", "--src-tls-verify=false", source, f"{kind}:{path}"]
    await asyncio.to_thread(subprocess.run, argv, check=True)
    found = await import_image(path, store, "swe/mine")
    assert found.reference == "docker.io/swe/mine:latest"
    assert [(path / "etc/motd").read_text() for path in found.layers] == ["a", "b"]
    assert store.find("swe/mine") == found


def layout(folder: Path, image: Any, **entry: Any) -> Path:
    """Write an image as an OCI layout by hand."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    body = image.manifest.body
    for digest, data in {**image.blobs, sha256(body): body}.items():
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
    entry = {"digest": sha256(body), "size": len(body), **entry}
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    return folder


async def test_list_of_platforms_is_reduced(
    store: Store,
    make_image: Make,
    make_index: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    amd, arm = make_image("amd"), make_image("arm", architecture="arm64")
    index = make_index(amd64=amd.manifest, arm64=arm.manifest)
    blobs = {
        **amd.blobs,
        **arm.blobs,
        **{sha256(i.manifest.body): i.manifest.body for i in (amd, arm)},
    }
    whole = type(amd)(blobs, index)
    path = layout(tmp_path / "l", whole, mediaType=INDEX_TYPES[0])
    found = await import_image(path, store, "swe/task")
    assert found.digest == arm.manifest.digest


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path, image: (path / "index.json").write_text("{"), "is not JSON"),
        (lambda path, image: blob(path, image.layers[0]).unlink(), "lacks blobs/sha256"),
        (lambda path, image: spoil(blob(path, image.layers[0])), "does not match"),
        (lambda path, image: spoil(blob(path, image.manifest.digest)), "does not match"),
    ],
)
async def test_damaged_layout_is_one_clear_error(
    store: Store, make_image: Make, tmp_path: Path, harm: Any, words: str
) -> None:
    image = make_image("a")
    path = layout(tmp_path / "l", image)
    harm(path, image)
    with pytest.raises(ImageError, match=words) as caught:
        await import_image(path, store, "swe/task")
    assert caught.value.hint
    assert store.names() == []


def spoil(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def blob(path: Path, digest: str) -> Path:
    return path / "blobs" / "sha256" / digest.removeprefix("sha256:")


async def test_file_that_is_no_image_is_your_input(store: Store, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no tar")
    tar = tmp_path / "some.tar"
    tar.write_bytes(make_tar(Entry("readme")))
    (tmp_path / "folder").mkdir()
    for path, words in (
        (text, "cannot be read as a folder or a tar"),
        (tar, "is not an OCI image layout"),
        (tmp_path / "folder", "is not an OCI image layout"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(InputError, match=words):
            await import_image(path, store, "swe/task")
    assert store.names() == []


async def test_digest_that_leads_out_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "l").mkdir()
    entry = {"digest": "sha256:../../../secret", "size": 2}
    (tmp_path / "l" / "index.json").write_text(json.dumps({"manifests": [entry]}))
    with pytest.raises(ImageError):
        await import_image(tmp_path / "l", store, "swe/task")
