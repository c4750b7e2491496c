"""The daemons that tests run really run, are shared, and leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ..services import dockerd as dockerd_module
from ..services.image import BaseImage
from ..services.shared import shared
from ..unit.sandboxes.helpers import eventually

ROOT = Path(__file__).resolve().parents[2]


def test_the_image_is_in_the_daemon_and_runs(dockerd: str, docker_image: str) -> None:
    import docker

    client = docker.DockerClient(base_url=dockerd)
    script = "id -un; pwd; git --version; python3 -c 'import json, ssl, sqlite3; print(6 * 7)'"
    said = client.containers.run(
        docker_image, ["sh", "-c", script], network_mode="none", remove=True, stderr=True
    )
    client.close()
    user, workdir, git, answer = said.decode().splitlines()
    assert (user, workdir, answer) == ("agent", "/testbed", "42")
    assert git.startswith("git version")


def test_the_registry_serves_the_image(pushed_image: str, base_image: BaseImage) -> None:
    address, _, rest = pushed_image.partition("/")
    name, _, tag = rest.partition(":")
    url = f"http://{address}/v2/{name}/manifests/{tag}"
    request = urllib.request.Request(
        url, headers={"Accept": "application/vnd.oci.image.manifest.v1+json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Docker-Content-Digest"] == base_image.manifest


KILLED = """
import os, sys
from pathlib import Path
from tests.services.shared import shared
with shared(sys.argv[1], Path(sys.argv[2])) as address:
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["registry", "dockerd"])
async def test_it_stops_with_its_last_user_even_a_killed_one(kind: str, tmp_path: Path) -> None:
    child = subprocess.Popen(  # noqa: ASYNC220  it is another worker
        [sys.executable, "-c", KILLED, kind, str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout
    address = child.stdout.readline().strip()
    if not address:
        pytest.skip(f"{kind} cannot run here")
    with shared(kind, tmp_path) as same:
        assert same == address
        child.kill()
        child.communicate()
        told = json.loads((tmp_path / f"{kind}.json").read_text())
        assert told["address"] == address
    await eventually(lambda: not (tmp_path / f"{kind}.json").exists())
    folder = Path(address.removeprefix("unix://")).parent if kind == "dockerd" else None
    if folder:
        assert not folder.exists()
        assert folder.name not in Path("/proc/self/mountinfo").read_text()
        assert not list(Path("/sys/fs/cgroup").glob(f"*/{folder.name}"))


async def test_a_killed_dockerd_leaves_nothing_once_stopped(docker_image: str) -> None:
    daemon = dockerd_module.start()
    daemon.process.kill()
    daemon.stop()
    words = os.fsencode(daemon.folder.name)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if words in _read(path)]
    assert not left
    assert not daemon.folder.exists()
    assert daemon.folder.name not in Path("/proc/self/mountinfo").read_text()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
