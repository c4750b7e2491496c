"""Seconds to mirror an image between two registries on this machine, beside skopeo.

`python bench/mirror.py [--json FILE] [--mib 256]`: needs docker-registry; skopeo takes its turn
where it is installed, and must come to the same digest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from swerl.images._http import http_session
from swerl.images._registry import Registry
from swerl.images.mirror import mirror
from swerl.oci.manifest import IMAGE_TYPES, Blob, Manifest, sha256
from swerl.oci.reference import Target

NUM_LAYERS = 4
CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "{host}"}}
"""


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run a registry on loopback and yield its host."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "config.yml").write_text(CONFIG.format(folder=folder, host=host))
    process = subprocess.Popen(
        ["docker-registry", "serve", str(folder / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(1)
        yield host
    finally:
        process.terminate()
        process.wait()


async def push(host: str, mib: int) -> str:
    """Push an image of random layers and return its name."""
    layers = [os.urandom((mib << 20) // NUM_LAYERS) for _ in range(NUM_LAYERS)]
    rootfs = {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    blobs = {
        "application/vnd.oci.image.config.v1+json": [config],
        "application/vnd.oci.image.layer.v1.tar": layers,
    }
    entries = [
        {"mediaType": kind, "digest": sha256(data), "size": len(data)}
        for kind, datas in blobs.items()
        for data in datas
    ]
    body = {
        "schemaVersion": 2,
        "mediaType": IMAGE_TYPES[0],
        "config": entries[0],
        "layers": entries[1:],
    }
    async with http_session() as http:
        client = Registry(host, http, Path("no-config"))
        for data in (config, *layers):
            await client.upload("swe/big", Blob(sha256(data), len(data)), chunks(data))
        manifest = Manifest("big", json.dumps(body).encode(), IMAGE_TYPES[0])
        await client.put_manifest("swe/big", "v1", manifest)
    return f"{host}/swe/big:v1"


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    """Yield some bytes."""
    yield data


def timed_mirror(image: str, target: str, folder: Path) -> tuple[float, str]:
    """Return the seconds of one `mirror` and the digest that it came to."""
    started = time.perf_counter()
    report = asyncio.run(mirror([image], Target(target, "m"), folder / "lock.json"))
    (done,) = report.images
    assert done.pinned, done.error
    return time.perf_counter() - started, done.pinned.digest


def timed_skopeo(image: str, target: str) -> tuple[float, str]:
    """Return the seconds of one `skopeo copy` and the digest that it came to."""
    name = f"docker://{target}/m/swe/big:v1"
    insecure = ["--src-tls-verify=false", "--dest-tls-verify=false", "--preserve-digests"]
    started = time.perf_counter()
    subprocess.run(["skopeo", "copy", "-q", *insecure, f"docker://{image}", name], check=True)
    seconds = time.perf_counter() - started
    inspect = ["skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", name]
    return seconds, subprocess.check_output(inspect, text=True).strip()


def measure(mib: int) -> dict[str, float]:
    """Return seconds by what was done."""
    with tempfile.TemporaryDirectory() as name, registry(Path(name) / "source") as source:
        folder = Path(name)
        image = asyncio.run(push(source, mib))
        with registry(folder / "ours") as ours:
            first_s, digest = timed_mirror(image, ours, folder)
            again_s, _ = timed_mirror(image, ours, folder)
        found = {"swerl": first_s, "swerl again": again_s}
        if shutil.which("skopeo"):
            with registry(folder / "theirs") as theirs:
                found["skopeo"], other = timed_skopeo(image, theirs)
            assert other == digest
        return found


def main() -> None:
    """Print a table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--mib", type=int, default=256, help="size of the image")
    args = parser.parse_args()
    if shutil.which("docker-registry") is None:
        sys.stdout.write("skipped: docker-registry is not installed\n")
        return
    found = measure(args.mib)
    for name, seconds in found.items():
        sys.stdout.write(f"{name:12} {seconds:8.3f} s for {args.mib} MiB\n")
    if args.json:
        args.json.write_text(json.dumps({"mib": args.mib, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
