"""Baking agents into images of a real registry on loopback."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from swerl.core.image_reference import parse
from swerl.core.sandbox import Mount
from swerl.images.bake import AgentLayer, bake, make_layer
from swerl.images.http import RegistryOptions, http_session
from swerl.images.manifest import Blob, sha256
from swerl.images.mirror import LockFile, Pinned
from swerl.images.registry import Registry
from tests.unit.images.layers import Make, Push

TARGET = "/opt/swerl/agents/tool"


def no_login(folder: Path) -> RegistryOptions:
    return RegistryOptions(docker_config=folder / "none.json")


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """An agent's bundle: a program, a link to it, a second hard link, an odd name."""
    folder = tmp_path / "bundle"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
    (folder / "bin" / "tool").chmod(0o700)
    (folder / "link").symlink_to("bin/tool")
    (folder / "bin" / "same").hardlink_to(folder / "bin" / "tool")
    (folder / "é\nodd").write_text("x")
    return folder


@pytest.fixture
def layer(agent: Path, tmp_path: Path) -> AgentLayer:
    return make_layer([Mount(agent, TARGET)], ["tool@1.2.3"], tmp_path / "layer.tar.gz")


async def fetch(reference: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an image's manifest and config."""
    place = parse(reference)
    async with http_session() as http:
        registry = Registry(place.registry, http, folder / "none.json")
        manifest = await registry.manifest(place.repository, place.version)
        parts = [part async for part in registry.blob(place.repository, manifest.blobs()[0])]
    return json.loads(manifest.body), json.loads(b"".join(parts))


def test_the_same_files_make_the_same_layer(agent: Path, layer: AgentLayer, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(agent, copy, symlinks=True)
    again = make_layer([Mount(copy, TARGET)], ["tool@1.2.3"], tmp_path / "again.tar.gz")
    assert (again.blob, again.diff_id) == (layer.blob, layer.diff_id)


def test_the_layer_holds_the_bundle_for_every_user(layer: AgentLayer) -> None:
    data = layer.path.read_bytes()
    assert layer.blob == Blob(sha256(data), len(data))
    assert layer.diff_id == sha256(gzip.decompress(data))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {member.name: member for member in tar}
        inside = TARGET.lstrip("/")
        assert set(found) == {
            inside, *(f"{inside}/{n}" for n in ("bin", "bin/tool", "bin/same", "link", "é\nodd"))
        }  # fmt: skip
        for program in ("tool", "same"):
            file = tar.extractfile(f"{inside}/bin/{program}")
            assert file
            assert file.read() == b"#!/bin/sh\necho tool\n"
            assert found[f"{inside}/bin/{program}"].mode == 0o755
        assert found[f"{inside}/link"].linkname == "bin/tool"


async def test_every_image_gains_one_layer_and_keeps_its_own(
    registry: Any, push: Push, make_image: Make, layer: AgentLayer, tmp_path: Path
) -> None:
    pinned = {}
    for name, image in (("one", make_image("a")), ("two", make_image("a", "b"))):
        await push(image, f"swe/{name}")
        reference = f"{registry.host}/swe/{name}@{image.manifest.digest}"
        pinned[name] = Pinned("from", image.manifest.digest, reference, 1)
    lock = tmp_path / "baked.json"

    done = await bake(pinned, layer, lock, options=no_login(tmp_path))

    assert [one.error for one in done] == [None, None]
    for name, baked in LockFile(lock).images.items():
        before, old = await fetch(pinned[name].reference, tmp_path)
        after, new = await fetch(baked.reference, tmp_path)
        assert after["layers"][:-1] == before["layers"]
        assert after["layers"][-1]["digest"] == layer.blob.digest
        assert "history" not in new  # the image has none: a lone step would not fit its layers
        assert new["rootfs"]["diff_ids"] == [*old["rootfs"]["diff_ids"], layer.diff_id]
        assert new["config"]["Labels"] == {"swerl.agents": "tool@1.2.3"}
    assert registry.half_written() == []


async def test_other_tools_take_a_baked_image(
    registry: Any, push: Push, make_image: Make, layer: AgentLayer, tmp_path: Path
) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    image = make_image("a", "b")
    await push(image, "swe/one")
    reference = f"{registry.host}/swe/one@{image.manifest.digest}"
    known = {"one": Pinned("f", image.manifest.digest, reference, 1)}
    (done,) = await bake(known, layer, tmp_path / "l.json", options=no_login(tmp_path))
    assert done.pinned
    name = f"docker://{done.pinned.reference}"
    copy = ["skopeo", "copy", "-q", "--src-tls-verify=false", name, f"oci:{tmp_path}/layout:x"]
    copying = await asyncio.create_subprocess_exec(*copy, stderr=asyncio.subprocess.PIPE)
    _, said = await copying.communicate()
    assert copying.returncode == 0, said
