"""The test image as an OCI layout and as an archive for `docker load`, made without any daemon."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import rootfs

NAME = "swerl-test/base:1"
_TAG = "1"
_TYPE = "application/vnd.oci.image"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class BaseImage:
    """The test image on disk."""

    layout: Path
    """OCI layout folder; its tag is `1`."""
    archive: Path
    """What `docker load` takes."""
    name: str = NAME


@dataclass(frozen=True, slots=True)
class _Blob:
    digest: str
    size: int
    content: str = ""
    """Digest of what a layer holds, uncompressed."""


def build(folder: Path) -> BaseImage:
    """Make the image in `folder`, once. Raises CannotRunError where a program is missing."""
    layout, archive = folder / "oci", folder / "archive.tar"
    if not archive.exists():
        shutil.rmtree(layout, ignore_errors=True)
        (layout / "blobs" / "sha256").mkdir(parents=True)
        layers = [_layer(layout, rootfs.write_system), _layer(layout, _write_home)]
        config = _json_blob(layout, _config(layers))
        _write_index(layout, config, layers)
        _write_archive(layout, archive, config, layers)
    return BaseImage(layout, archive)


def _write_home(tar: tarfile.TarFile) -> None:
    for path in ("/home/agent", rootfs.WORKDIR):
        rootfs.add_folder(tar, path, rootfs.AGENT_ID)


def _layer(layout: Path, write: Callable[[tarfile.TarFile], None]) -> _Blob:
    draft = layout / "layer.tar"
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as tar:
        write(tar)
    with draft.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    packed = layout / "layer.tar.gz"
    with (
        draft.open("rb") as file,
        packed.open("wb") as out,
        gzip.GzipFile("", "wb", 1, out, mtime=0) as squeezed,
    ):
        shutil.copyfileobj(file, squeezed, 1 << 20)
    draft.unlink()
    with packed.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = packed.stat().st_size
    packed.rename(layout / "blobs" / "sha256" / digest)
    return _Blob(f"sha256:{digest}", size, f"sha256:{content}")


def _config(layers: list[_Blob]) -> dict[str, object]:
    return {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": "2023-11-14T22:13:20Z",
        "config": {
            "User": "agent",
            "WorkingDir": rootfs.WORKDIR,
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Cmd": ["sh"],
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.content for layer in layers]},
        "history": [{"created_by": "swerl tests"} for _ in layers],
    }


def _json_blob(layout: Path, value: object) -> _Blob:
    data = json.dumps(value).encode()
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(data)
    return _Blob(f"sha256:{digest}", len(data))


def _write_index(layout: Path, config: _Blob, layers: list[_Blob]) -> None:
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.manifest.v1+json",
        "config": _described(config, "config.v1+json"),
        "layers": [_described(layer, "layer.v1.tar+gzip") for layer in layers],
    }
    entry = _described(_json_blob(layout, manifest), "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": _TAG}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _described(blob: _Blob, kind: str) -> dict[str, object]:
    return {"mediaType": f"{_TYPE}.{kind}", "digest": blob.digest, "size": blob.size}


def _write_archive(layout: Path, archive: Path, config: _Blob, layers: list[_Blob]) -> None:
    names = [f"{blob.digest.partition(':')[2]}" for blob in (config, *layers)]
    inside = [f"{names[0]}.json", *(f"{name}/layer.tar" for name in names[1:])]
    manifest = [{"Config": inside[0], "RepoTags": [NAME], "Layers": inside[1:]}]
    draft = archive.with_suffix(".draft")
    with tarfile.open(draft, "w") as tar:
        for name, target in zip(names, inside, strict=True):
            tar.add(layout / "blobs" / "sha256" / name, target)
        data = json.dumps(manifest).encode()
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    draft.rename(archive)
