"""Conformance of every sandbox backend: files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxFileError, SandboxFolderError
from swerl.core.sandbox import Mount

from .helpers import LIMITS, WORKDIR, Target, sh


@pytest.mark.parametrize(
    "name", ["plain", "with space", "new\nline", "é漢😀", "-rf", "a/deep/er/path"]
)
async def test_files_keep_their_bytes_whatever_their_name(sandbox: Sandbox, name: str) -> None:
    data = bytes(range(256))
    await sandbox.write(f"{WORKDIR}/{name}", data)
    assert await sandbox.read(f"{WORKDIR}/{name}") == data
    assert (await sandbox.run(["cat", f"{WORKDIR}/{name}"])).stdout == data


async def test_a_hundred_megabytes_are_written_and_read(target: Target) -> None:
    data = os.urandom(1 << 20) * 100
    limits = replace(LIMITS, memory_mib=1024, disk_mib=512)
    async with target.open(limits) as sandbox:
        await sandbox.write("/tmp/big", data)
        digest = hashlib.sha256(data).hexdigest()
        assert (await sh(sandbox, "sha256sum < /tmp/big")).split()[0] == digest
        read = await sandbox.read("/tmp/big")
    assert hashlib.sha256(read).hexdigest() == digest


async def test_a_written_file_belongs_to_the_agent(sandbox: Sandbox) -> None:
    await sandbox.write(f"{WORKDIR}/new/f", b"1")
    assert (
        await sh(sandbox, "echo 2 >> new/f; touch new/g; stat -c %U new new/f") == "agent\nagent\n"
    )


ODD = """
mkdir /tmp/odd && cd /tmp/odd
mkdir folder && mkfifo pipe && echo x > file
ln -s loop loop && ln -s folder linked && ln -s /dev/zero device && ln -s nowhere/deep dangling
"""


@pytest.mark.parametrize("path", ["folder", "linked", "/tmp", "/"])
async def test_a_folder_is_no_file(sandbox: Sandbox, path: str) -> None:
    await sh(sandbox, ODD)
    with pytest.raises(IsADirectoryError) as read:
        await sandbox.read(f"/tmp/odd/{path}" if path[0] != "/" else path)
    with pytest.raises(IsADirectoryError) as written:
        await sandbox.write(f"/tmp/odd/{path}" if path[0] != "/" else path, b"x")
    assert isinstance(read.value, SandboxFolderError)
    assert isinstance(written.value, SandboxFolderError)


@pytest.mark.parametrize(
    "path",
    [
        *("pipe", "loop", "loop/x", "device", "/dev/zero", "file/below", "x" * 300),
        *("x/" * 3000, "a\0b", "", "half\ud800"),
    ],
    ids=lambda path: ascii(path[:12]),
)
async def test_a_path_that_code_inside_can_make_is_its_own_doing(
    sandbox: Sandbox, path: str
) -> None:
    await sh(sandbox, ODD)
    whole = path if path.startswith("/") or not path else f"/tmp/odd/{path}"
    with pytest.raises((FileNotFoundError, SandboxFileError)):
        await sandbox.read(whole)
    with pytest.raises(SandboxFileError) as found:
        await sandbox.write(whole, b"x")
    assert found.value.from_inside
    # The sandbox works as before.
    await sandbox.write("/tmp/odd/file", b"y")
    assert await sandbox.read("/tmp/odd/file") == b"y"


async def test_a_full_disk_is_the_doing_of_code_inside(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError) as found:
        await sandbox.write("/tmp/big", bytes(LIMITS.disk_mib + 64 << 20))
    assert found.value.from_inside


async def test_links_do_not_lead_out(sandbox: Sandbox, host_secret: str) -> None:
    up = "/".join([".."] * 20)
    links = {
        "absolute": host_secret,
        "climbing": up + host_secret,
        "magic": "/proc/1/root" + host_secret,
    }
    for name, target in links.items():
        await sh(sandbox, f"ln -s {target} /tmp/{name}")
        with pytest.raises((FileNotFoundError, SandboxError)):
            await sandbox.read(f"/tmp/{name}")
    await sh(sandbox, f"ln -s {os.path.dirname(host_secret)} /tmp/folder")  # noqa: PTH120
    with pytest.raises((FileNotFoundError, SandboxError)):
        await sandbox.write("/tmp/folder/secret", b"overwritten")
    assert open(host_secret).read() == "host secret"  # noqa: PTH123, ASYNC230, SIM115


async def test_a_link_is_followed_inside(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir real && ln -s /testbed/real link && echo hi > real/f")
    assert await sandbox.read(f"{WORKDIR}/link/f") == b"hi\n"


async def test_a_read_only_mount_shows_a_host_folder(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tool")
    folder.chmod(0o755)  # the ordinary user of a container is not the host's
    (folder / "f").write_text("tool")
    async with target.open(mounts=[Mount(folder, "/opt/tool")]) as sandbox:
        assert await sh(sandbox, "cat /opt/tool/f") == "tool"
        assert (await sandbox.run(["touch", "/opt/tool/g"])).exit_code == 1
        with pytest.raises(SandboxError):
            await sandbox.write("/opt/tool/f", b"x")
    assert (folder / "f").read_text() == "tool"
