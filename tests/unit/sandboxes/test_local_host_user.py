"""The host user of a `local` sandbox's processes if root opens it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swerl.core.sandbox import Limits, Mount
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes import local
from swerl.sandboxes._local import stage
from swerl.sandboxes._local.wire import SandboxPlan

from .helpers import eventually, host_processes, sh

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)


@pytest.fixture
def backend() -> local.LocalBackend:
    if not stage.can_change_user():
        pytest.skip("not root, or root without the right to become another user")
    return local.build(local.Options())


def ids(pid: int) -> set[str]:
    """Return all user and group numbers of a process as the host sees them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {word for line in lines if line[:4] in ("Uid:", "Gid:") for word in line.split()[1:]}


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_no_process_of_a_sandbox_is_the_hosts_root(
    backend: local.LocalBackend, user: str
) -> None:
    token = f"77{os.getpid()}"
    async with (
        backend.open("host", LIMITS, workdir="/testbed") as one,
        backend.open("host", LIMITS, workdir="/testbed") as other,
        one.start(["sleep", token], user=user),
    ):
        await eventually(lambda: host_processes(f"sleep\0{token}"))
        [command] = host_processes(f"sleep\0{token}")
        assert ids(command) == ids(one.pid)
        assert len(ids(command)) == 1
        assert ids(command).isdisjoint(ids(other.pid) | {"0"})


async def test_roots_folders_belong_to_the_agent_inside(
    backend: local.LocalBackend, tmp_path: Path
) -> None:
    content, mounted = tmp_path / "content", tmp_path / "mounted"
    for folder in (content, mounted):
        folder.mkdir(mode=0o700)
        (folder / "f").write_text("x")
        (folder / "f").chmod(0o600)
    mounts = [Mount(mounted, "/opt/m")]
    async with backend.open(f"dir:{content}", LIMITS, workdir="/testbed", mounts=mounts) as sandbox:
        assert await sh(sandbox, "cat f /opt/m/f; stat -c %U f . /opt/m/f") == "xx" + "agent\n" * 3
        await sh(sandbox, "echo y > f; mkdir d; echo z > d/g")
        await sandbox.write("/testbed/e/h", b"h")
        assert await sh(sandbox, "cat e/h; echo i >> e/h; stat -c %U e e/h") == "hagent\nagent\n"
        await sandbox.capture(tmp_path / "layer")
    assert {path.stat().st_uid for path in (tmp_path / "layer").rglob("*")} == {0}
    assert (content / "f").read_text() == "x"


async def test_a_file_system_without_idmapped_mounts_keeps_its_owner(
    backend: local.LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = SandboxPlan(
        "swerl-1-a", "/w", content=str(tmp_path), host_id=stage.host_id_of("swerl-1-a")
    )
    assert stage.choose_user(plan).uid == plan.host_id

    def refuse(*_: object, **__: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(kernel, "view", refuse)
    assert stage.choose_user(plan) == stage.HostUser(os.geteuid())


async def test_files_of_another_sandbox_on_disk_are_inaccessible(tmp_path: Path) -> None:
    backend = local.build(local.Options(scratch=tmp_path))
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        assert (tmp_path / sandbox.id).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("path", ["/dev/null", "/usr/bin/env", "/etc/ld.so.cache"])
async def test_times_of_shared_files_carry_no_note(backend: local.LocalBackend, path: str) -> None:
    async with (
        backend.open("host", LIMITS, workdir="/testbed") as one,
        backend.open("host", LIMITS, workdir="/testbed") as other,
    ):
        before = await sh(other, f"stat -c %y {path}")
        await one.run(["touch", path])
        assert await sh(other, f"stat -c %y {path}") == before
