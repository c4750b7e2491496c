"""swerl itself runs in a container: the options of docs/guides/sandboxes.md suffice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "sandboxes.md").read_text()
UNCONFINED = (
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)
CGROUPS = (
    "--cap-add SYS_ADMIN --cap-add SYS_PTRACE --cap-add NET_ADMIN -v /sys/fs/cgroup:/sys/fs/cgroup"
)
LOCAL = """
import asyncio
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

async def main():
    async with local.build(local.Options()).open("host", Limits(), workdir="/tmp/w") as sandbox:
        done = await sandbox.run(["id", "-u"])
        print(done.exit_code, sorted(sandbox.limits))

asyncio.run(main())
"""
DOCKER = """
import asyncio, pathlib, sys
from swerl.core.sandbox import Limits, Mount
from swerl.sandboxes import docker

class Listener:
    async def attach(self, sock):
        self.server = await asyncio.start_server(self.serve, sock=sock)

    async def serve(self, reader, writer):
        writer.write(b"hello")
        await writer.drain()
        writer.close()

FETCH = "import socket, sys; port = int(sys.argv[1].rpartition(':')[2]); "
FETCH += "print(socket.create_connection(('127.0.0.1', port)).recv(9))"

async def main(image, folder):
    agent = pathlib.Path(folder, "agent")
    agent.mkdir()
    (agent / "file").write_text("mounted")
    backend = docker.build(docker.Options())
    mounts = [Mount(agent, "/opt/agent")]
    async with backend.open(image, Limits(), workdir="/testbed", mounts=mounts) as sandbox:
        print((await sandbox.run(["cat", "/opt/agent/file"])).text)
        url = await sandbox.expose(Listener())
        print((await sandbox.run(["python3", "-c", FETCH, url], timeout_s=20)).text)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that has the same path inside."""
    with tempfile.TemporaryDirectory(prefix="swerl-", dir="/srv") as name:
        yield Path(name)


def python(dockerd: str, image: str, options: str, *arguments: str) -> str:
    """Run Python with swerl in a container that sees this machine's programs."""
    if not shutil.which("docker"):
        pytest.skip("the docker command is not installed")
    home = Path(os.path.realpath(sys.executable)).parents[1]
    places = ["/usr", "/lib", "/lib64", "/bin", "/etc", str(home), sys.prefix, str(ROOT)]
    mounts = [f"-v={place}:{place}:ro" for place in places if Path(place).exists()]
    command = ["docker", "run", "--rm", "--network=none", "--user=root", *options.split(), *mounts]
    command += ["-eHOME=/root", "-eSWERL_STATE=/tmp/s", f"-ePYTHONPATH={ROOT}/src"]
    command += [f"--entrypoint={sys.executable}", image, "-c", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "DOCKER_HOST": dockerd}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("more", ["", CGROUPS])
def test_local_sandboxes_open_in_a_container(dockerd: str, docker_image: str, more: str) -> None:
    assert UNCONFINED in GUIDE and more in GUIDE
    output = python(dockerd, docker_image, f"{UNCONFINED} {more}", LOCAL)
    assert output.startswith("0 ")
    assert ("memory" in output) == bool(more and os.access("/sys/fs/cgroup", os.W_OK))


def test_docker_sandboxes_open_through_the_hosts_socket(
    dockerd: str, docker_image: str, folder: Path
) -> None:
    socket = dockerd.removeprefix("unix://")
    options = f"-v {socket}:/var/run/docker.sock -v {folder}:{folder}"
    assert "-v /var/run/docker.sock:/var/run/docker.sock -v /srv/swerl:/srv/swerl" in GUIDE
    output = python(dockerd, docker_image, options, DOCKER, docker_image, str(folder))
    assert "mounted" in output and "hello" in output
