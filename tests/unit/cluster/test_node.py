"""The kernel's count of out-of-memory kills, in every place where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.cluster.node import num_oom_kills

GROUPS = {"v1": "4:cpu,memory:/job/1\n0::/\n", "v2": "0::/job/1\n"}


@pytest.mark.parametrize(
    ("groups", "place"),
    [
        ("v1", "sys/fs/cgroup/memory/job/1/memory.oom_control"),
        ("v1", "sys/fs/cgroup/memory/memory.oom_control"),
        ("v2", "sys/fs/cgroup/job/1/memory.events.local"),
        ("v2", "sys/fs/cgroup/memory.events.local"),
    ],
)
def test_the_count_of_the_own_group_is_taken_before_the_machines(
    tmp_path: Path, groups: str, place: str
) -> None:
    put(tmp_path / "proc/self/cgroup", GROUPS[groups])
    put(tmp_path / "proc/vmstat", "nr_free_pages 7\noom_kill 149\n")
    assert num_oom_kills(tmp_path) == 149
    put(tmp_path / place, "oom 9\noom_kill_disable 0\noom_kill 2\n")
    assert num_oom_kills(tmp_path) == 2


def test_a_machine_that_counts_nothing_has_none(tmp_path: Path) -> None:
    assert num_oom_kills(tmp_path) == 0
    assert num_oom_kills() >= 0


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
