"""Cgroups of both versions are found and written, on simulated machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import limits
from swerl.sandboxes._local.wire import SandboxPlan

PLAN = SandboxPlan("swerl-1-a", "/w", memory_mib=64, num_processes=9, num_cpus=1.5)


def machine(tmp_path: Path, cgroups: str, mounts: str) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroups)
    (proc / "mountinfo").write_text(mounts.replace("ROOT", str(tmp_path)))
    return proc


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    mounts = "30 1 0:26 / ROOT rw - cgroup2 cgroup2 rw\n31 1 0:27 / /x rw - tmpfs tmpfs rw\n"
    (tmp_path / "user.slice" / "own").mkdir(parents=True)
    return machine(tmp_path, "0::/user.slice/own\n", mounts)


def hand_down(folder: Path, controllers: str) -> Path:
    (folder / "cgroup.subtree_control").write_text(controllers)
    (folder / "cgroup.procs").touch()
    return folder


def test_version_2_uses_the_nearest_delegating_group(tmp_path: Path, unified: Path) -> None:
    """A group with processes in it hands nothing down, by the kernel's rules."""
    hand_down(tmp_path / "user.slice" / "own", "\n")
    above = hand_down(tmp_path / "user.slice", "pids\n")
    top = hand_down(tmp_path, "memory pids cpu\n")
    assert limits.find(unified) == {"pids": above, "memory": top, "cpu": top}


def test_version_2_needs_the_right_to_move_processes(tmp_path: Path, unified: Path) -> None:
    hand_down(tmp_path / "user.slice", "memory pids cpu\n")
    (tmp_path / "user.slice" / "cgroup.procs").unlink()
    assert limits.find(unified) == {}


def test_version_1_follows_a_containers_mount(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    mounts = "30 1 0:26 /docker/abc ROOT rw - cgroup cgroup rw,memory\n"
    proc = machine(tmp_path, "4:memory:/docker/abc/sub\n3:cpu,cpuacct:/\n", mounts)
    assert limits.find(proc) == {"memory": tmp_path / "sub"}


def test_version_2_limits_are_written(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids cpu")
    held = limits.enter(dict.fromkeys(("memory", "pids", "cpu"), tmp_path), PLAN)
    assert held == {"memory", "pids", "cpu"}
    written = {path.name: path.read_text() for path in (tmp_path / PLAN.id).iterdir()}
    assert written["memory.max"] == str(64 << 20)
    assert written["pids.max"] == "9"
    assert written["cpu.max"] == "150000 100000"
    assert written["memory.swap.max"] == written["cgroup.procs"] == "0"


def test_version_2_kills_a_whole_group_at_once(tmp_path: Path) -> None:
    group = tmp_path / "swerl-1-a"
    group.mkdir()
    (group / "cgroup.kill").touch()
    assert limits.leftovers({"memory": tmp_path, "pids": tmp_path}) == [group]
    limits.remove({"memory": tmp_path}, group.name)
    assert (group / "cgroup.kill").read_text() == "1"


NEIGHBOUR_MS = 2000


async def test_a_spinning_sandbox_leaves_its_neighbour_an_equal_part() -> None:
    wanted = Limits(memory_mib=64, num_processes=64, num_cpus=64.0, disk_mib=16, lifetime_s=120)
    backend = local.build(local.Options())
    async with (
        backend.open("host", wanted, workdir="/w") as busy,
        backend.open("host", wanted, workdir="/w") as other,
    ):
        if "cpu" not in busy.limits:
            pytest.skip("this user cannot create a CPU cgroup")
        spin = "for each in $(seq 32); do (while :; do :; done) & done; wait"
        async with busy.start(["sh", "-c", spin]):
            await other.run(["true"])
            times = [(await other.run(["true"])).duration_s for _ in range(20)]
    assert sorted(times)[10] * 1000 < NEIGHBOUR_MS
