"""Finding and writing cgroups of both versions, on described machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.sandboxes._local import cgroup
from swerl.sandboxes._local.wire import Plan

PLAN = Plan("swerl-1-a", "/w", memory_mib=64, num_processes=9, num_cpus=1.5)


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


def test_version_2_gives_what_is_handed_down(tmp_path: Path, unified: Path) -> None:
    own = tmp_path / "user.slice" / "own"
    (own / "cgroup.subtree_control").write_text("memory pids\n")
    assert cgroup.find(unified) == {"memory": own, "pids": own}


def test_version_2_without_delegation_gives_none(unified: Path) -> None:
    assert cgroup.find(unified) == {}


def test_version_1_follows_a_containers_mount(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    mounts = "30 1 0:26 /docker/abc ROOT rw - cgroup cgroup rw,memory\n"
    proc = machine(tmp_path, "4:memory:/docker/abc/sub\n3:cpu,cpuacct:/\n", mounts)
    assert cgroup.find(proc) == {"memory": tmp_path / "sub"}


def test_version_2_limits_are_written(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids cpu")
    held = cgroup.enter(dict.fromkeys(("memory", "pids", "cpu"), tmp_path), PLAN)
    assert held == {"memory", "pids", "cpu"}
    written = {path.name: path.read_text() for path in (tmp_path / PLAN.id).iterdir()}
    assert written["memory.max"] == str(64 << 20)
    assert written["pids.max"] == "9"
    assert written["cpu.max"] == "150000 100000"


def test_a_group_that_cannot_be_made_is_no_limit(tmp_path: Path) -> None:
    assert cgroup.enter({"memory": tmp_path / "absent"}, PLAN) == set()
