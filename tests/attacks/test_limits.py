"""Attacks that exceed a limit, or outlive one. Each stops at a bound, to protect the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swerl.sandboxes._local import limits

from .box import LIMITS, Box, worked

SMALL = replace(LIMITS, memory_mib=128, num_processes=32, num_cpus=0.5, disk_mib=32)
FOLDERS = ["/testbed", "/tmp", "/var/tmp", "/home/agent", "/run"]
NEEDS_GROUPS = pytest.mark.skipif(not limits.find(), reason="no writable control group")


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("greedy.fork", (128,)),
        ("greedy.hold_memory", (384,)),
        pytest.param("greedy.hold_memory_together", (6, 64), marks=NEEDS_GROUPS),
        ("greedy.fill", (FOLDERS, 96)),
        ("greedy.fill", (["/dev/shm", "/dev"], 384)),
        ("greedy.make_files", ("/testbed", 200_000, 4.0)),
        ("greedy.open_files", (1 << 20,)),
    ],
)
async def test_a_limit_holds_and_the_sandbox_still_answers(
    box: Box, program: str, arguments: tuple[object, ...]
) -> None:
    async with box.other(SMALL) as small:
        outcomes = await small.attack(program, *arguments)
        # Files without content fill only the disk's table of files: any end is fine.
        assert not worked(outcomes) or program == "greedy.make_files", outcomes
        assert (await small.sh("echo here")).stdout == b"here\n"
