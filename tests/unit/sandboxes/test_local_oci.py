"""OCI images in the `local` sandbox: their files, our files over them, nothing of the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swerl.core.sandbox import Limits
from swerl.core.secrets import cache_dir
from swerl.sandboxes import local
from tests.unit.images.layers import Entry, add_image, folder, symlink

from .helpers import sh

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
NAME = "docker.io/swe/task:latest"
PROGRAMS = ("sh", "cat", "ls", "id", "env", "rm", "mkdir", "touch", "stat")
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nworker:x:1007:1007::/work:/bin/sh"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    return cache_dir()


def system() -> list[Entry]:
    """Return a layer with a few of this machine's programs, as an image without any daemon."""
    entries = {"bin": symlink("bin", "usr/bin")}
    for name in ("lib", "lib64"):
        if Path("/", name).is_symlink():
            entries[name] = symlink(name, str(Path("/", name).readlink()))
    for name in PROGRAMS:
        path = Path(shutil.which(name) or "").resolve()
        entries[name] = Entry(f"usr/bin/{name}", path.read_bytes(), mode=0o755)
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", said):
            inside = os.path.realpath(os.path.dirname(library))[1:]  # noqa: PTH120
            inside = f"{inside}/{Path(library).name}"
            entries[inside] = Entry(inside, Path(library).read_bytes(), mode=0o755)
    entries["passwd"] = Entry("etc/passwd", PASSWD)
    return list(entries.values())


def make(cache: Path, *layers: list[Entry], **config: object) -> str:
    from swerl.images.store import default_store

    return add_image(default_store(), NAME, system(), *layers, config=config)


async def test_it_shows_the_image_and_nothing_of_the_host(
    backend: local.LocalBackend, cache: Path
) -> None:
    layers = [folder("opt"), Entry("opt/f", b"image's\n"), Entry("sys/kernel/x"), Entry("dev/sda")]
    make(cache, layers, Env=["PATH=/usr/bin:/opt", "A=1 2"])
    async with backend.open("swe/task", LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, 'cat /opt/f; echo "$A" $PATH') == "image's\n1 2 /usr/bin:/opt\n"
        assert sorted((await sh(sandbox, "ls /usr/bin")).split()) == sorted(PROGRAMS)
        assert (
            await sh(sandbox, "ls -A /sys /home /testbed")
            == "/home:\nagent\n\n/sys:\n\n/testbed:\n"
        )
        assert "sda" not in await sh(sandbox, "ls /dev")
        assert await sh(sandbox, "echo x > /dev/null; cat /proc/1/comm") != ""


async def test_our_user_exists_beside_the_images_own(
    backend: local.LocalBackend, cache: Path
) -> None:
    make(cache, [Entry("etc/hosts", b"10.0.0.1 elsewhere\n"), symlink("etc/resolv.conf", "/run/x")])
    async with backend.open(NAME, LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "id -un; id -u; id -gn; echo ~ $SHELL $USER") == (
            "agent\n1000\nagent\n/home/agent /bin/sh agent\n"
        )
        assert await sh(sandbox, "id -u worker; id -un", user="root") == "1007\nroot\n"
        assert await sh(sandbox, "cat /etc/hosts") == "127.0.0.1 localhost sandbox\n"
        assert await sh(sandbox, "cat /etc/resolv.conf") == ""


async def test_removed_and_hidden_files_of_lower_layers_stay_absent(
    backend: local.LocalBackend, cache: Path
) -> None:
    low = [Entry("opt/gone", b"1"), Entry("opt/kept", b"2"), Entry("srv/a", b"3"), Entry("srv/b/c")]
    high = [Entry("opt/.wh.gone"), Entry("srv/.wh..wh..opq"), Entry("srv/new", b"4")]
    make(cache, low, high)
    async with backend.open(NAME, LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "ls -A /opt /srv") == "/opt:\nkept\n\n/srv:\nnew\n"
