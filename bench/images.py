"""What moving task images costs, beside skopeo: 20 images that share most of their layers.

`python bench/images.py [--json FILE] [--mib 64]`: two real registries on loopback for each tool;
needs docker-registry. skopeo copies the same images in the same run, as many at once, where it is
installed, and must come to the same digests.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.image_reference import Target
from swerl.images.http import http_session
from swerl.images.manifest import IMAGE_TYPES, Blob, Manifest, sha256
from swerl.images.mirror import mirror
from swerl.images.plan import plan
from swerl.images.pull import pull
from swerl.images.registry import Registry
from swerl.images.store import Store

NUM_IMAGES = 20
NUM_SHARED = 3
"""Layers that all images have: a distribution, a Python, a test environment."""
OWN_SHARE = 0.02
"""Size of an image's own layer against the shared ones: a checkout beside an environment."""
WORKERS = 4
CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "{host}"}}
"""
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table."""

    step: str
    swerl_s: float
    peer_s: float | None = None
    """The same with the peer's tool; None where it is not installed or has no such step."""
    note: str = ""


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
        wait_for(host)
        yield host
    finally:
        process.terminate()
        process.wait()


def wait_for(host: str) -> None:
    """Wait until a registry takes connections."""
    name, _, port = host.partition(":")
    for _ in range(500):
        try:
            socket.create_connection((name, int(port)), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    sys.exit("docker-registry does not answer")


def make_layer(seed: int, mib: float) -> tuple[bytes, str]:
    """Return a gzip layer of many files that compress by half, and its diff id."""
    draw = random.Random(seed)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(max(1, int(mib * 16))):
            data = draw.randbytes(32 << 10) + bytes(32 << 10)
            entry = tarfile.TarInfo(f"layer{seed}/{number // 100}/{number}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    plain = out.getvalue()
    return gzip.compress(plain, 1, mtime=0), sha256(plain)


async def push_images(host: str, mib: int) -> list[str]:
    """Push the images and return their names."""
    shared = [make_layer(number, mib / NUM_SHARED) for number in range(NUM_SHARED)]
    names = []
    async with http_session() as http:
        client = Registry(host, http, Path("no-config"))
        for number in range(NUM_IMAGES):
            layers = [*shared, make_layer(100 + number, mib * OWN_SHARE)]
            await push(client, f"swe/task{number}", layers)
            names.append(f"{host}/swe/task{number}:v1")
    return names


async def push(client: Registry, repository: str, layers: list[tuple[bytes, str]]) -> None:
    """Push one image."""
    rootfs = {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    blobs = [(CONFIG_TYPE, config), *((LAYER_TYPE, data) for data, _ in layers)]
    entries = [
        {"mediaType": kind, "digest": sha256(data), "size": len(data)} for kind, data in blobs
    ]
    body = {
        "schemaVersion": 2,
        "mediaType": IMAGE_TYPES[0],
        "config": entries[0],
        "layers": entries[1:],
    }
    for _, data in blobs:
        if not await client.has_blob(repository, sha256(data)):
            await client.upload(repository, Blob(sha256(data), len(data)), chunks(data))
    manifest = Manifest(repository, json.dumps(body).encode(), IMAGE_TYPES[0])
    await client.put_manifest(repository, "v1", manifest)


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    """Yield some bytes."""
    yield data


def timed_mirror(images: list[str], target: str, lock: Path) -> tuple[float, list[str], int]:
    """Return the seconds of one `mirror`, the digests, and the bytes that moved."""
    started = time.perf_counter()
    report = asyncio.run(mirror(images, Target(target, "m"), lock))
    seconds = time.perf_counter() - started
    digests = [done.pinned.digest for done in report.images if done.pinned]
    assert len(digests) == len(images), report.failed
    return seconds, digests, report.moved_bytes


def timed_skopeo(images: list[str], target: str) -> tuple[float, list[str]]:
    """Return the seconds that skopeo takes for the images, WORKERS at once, and the digests."""
    insecure = ["--src-tls-verify=false", "--dest-tls-verify=false", "--preserve-digests"]

    def copy(image: str) -> str:
        place = f"docker://{target}/m/{image.partition('/')[2]}"
        subprocess.run(["skopeo", "copy", "-q", *insecure, f"docker://{image}", place], check=True)
        return place

    started = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        places = list(pool.map(copy, images))
    seconds = time.perf_counter() - started
    inspect = ["skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}"]
    return seconds, [subprocess.check_output([*inspect, p], text=True).strip() for p in places]


def measure(mib: int) -> list[Cost]:
    """Return what each step takes."""
    with tempfile.TemporaryDirectory() as name, registry(Path(name) / "source") as source:
        folder = Path(name)
        images = asyncio.run(push_images(source, mib))
        return [planned(images, folder), pulled(images, folder), *mirrored(images, folder)]


def planned(images: list[str], folder: Path) -> Cost:
    """Time `plan`."""
    started = time.perf_counter()
    made = asyncio.run(plan(images, Store(folder / "store")))
    seconds = time.perf_counter() - started
    note = f"{made.unique_bytes >> 20} MiB unique, {made.shared_bytes >> 20} MiB shared"
    return Cost("plan", seconds, note=note)


def pulled(images: list[str], folder: Path) -> Cost:
    """Time `pull` into an empty store; the peer is skopeo to one layout, then tar."""
    started = time.perf_counter()
    done = asyncio.run(pull(images, Store(folder / "pulled")))
    seconds = time.perf_counter() - started
    assert all(one.stored for one in done)
    peer_s = timed_unpack(images, folder / "layout") if shutil.which("skopeo") else None
    moved = sum(one.moved_bytes for one in done) >> 20
    return Cost("pull, ready to run", seconds, peer_s, f"{moved} MiB moved; peer: and tar -x")


def timed_unpack(images: list[str], layout: Path) -> float:
    """Return the seconds of skopeo into one OCI layout, and of tar for every layer once."""
    started = time.perf_counter()
    for number, image in enumerate(images):
        copy = ["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{image}"]
        subprocess.run([*copy, f"oci:{layout}:{number}"], check=True)
    blobs = layout / "blobs" / "sha256"
    entries = json.loads((layout / "index.json").read_text())["manifests"]
    manifests = [json.loads((blobs / entry["digest"][7:]).read_text()) for entry in entries]
    layers = {layer["digest"][7:] for manifest in manifests for layer in manifest["layers"]}

    def unpack(digest: str) -> None:
        tree = layout / "trees" / digest
        tree.mkdir(parents=True)
        subprocess.run(["tar", "-xzf", str(blobs / digest), "-C", str(tree)], check=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(unpack, layers))
    return time.perf_counter() - started


def mirrored(images: list[str], folder: Path) -> Iterator[Cost]:
    """Time `mirror`, and skopeo with the same images."""
    peer: list[float | None] = [None, None]
    theirs: list[str] = []
    if shutil.which("skopeo"):
        with registry(folder / "theirs") as target:
            peer[0], theirs = timed_skopeo(images, target)
            peer[1], _ = timed_skopeo(images, target)
    with registry(folder / "ours") as target:
        for step, peer_s in zip(("mirror", "mirror again"), peer, strict=True):
            seconds, digests, moved = timed_mirror(images, target, folder / "lock.json")
            assert not theirs or digests == theirs
            yield Cost(step, seconds, peer_s, f"{moved / 2**20:.1f} MiB moved")
        (folder / "lock.json").unlink()
        seconds, _, moved = timed_mirror(images, target, folder / "lock.json")
        yield Cost(
            "mirror again, lock file lost", seconds, peer[1], f"{moved / 2**20:.1f} MiB moved"
        )


def show(costs: list[Cost], mib: int) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    title = f"{NUM_IMAGES} images of {mib} MiB, {NUM_SHARED} of 4 layers shared"
    table = Table("step", "swerl s", "skopeo s", "skopeo / swerl", "", title=title)
    for cost in costs:
        peer = f"{cost.peer_s:.2f}" if cost.peer_s else ""
        ratio = f"{cost.peer_s / cost.swerl_s:.1f}" if cost.peer_s else ""
        table.add_row(cost.step, f"{cost.swerl_s:.2f}", peer, ratio, cost.note)
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    """Read the command line, measure, show, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--mib", type=int, default=64, help="unpacked size of the shared layers")
    args = parser.parse_args()
    if shutil.which("docker-registry") is None:
        sys.stdout.write("skipped: docker-registry is not installed\n")
        return
    os.environ.setdefault("SWERL_CACHE", tempfile.gettempdir())
    costs = measure(args.mib)
    show(costs, args.mib)
    if args.json:
        rows = [asdict(cost) for cost in costs]
        args.json.write_text(json.dumps({"mib": args.mib, "costs": rows}, indent=2) + "\n")
        sys.stdout.write(f"written to {args.json}\n")


if __name__ == "__main__":
    main()
