"""The disk limit of a `local` sandbox with a scratch folder, and a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

from .helpers import sh

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=24, lifetime_s=60)


def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run(argv, env=environment, cwd="/", capture_output=True, text=True)


FULL = """
import asyncio, os, sys
from pathlib import Path
from swerl.core.errors import SwerlError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

async def main():
    scratch = Path(sys.argv[1])
    backend = local.build(local.Options(scratch=scratch))
    try:
        async with backend.open("host", Limits(disk_mib=64), workdir="/testbed"):
            print("opened")
    except SwerlError as error:
        print(type(error).__name__, error.hint)
    await asyncio.sleep(0.1)
    print([path.name for path in scratch.iterdir()])

asyncio.run(main())
"""


async def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a small disk")
    script = 'mount -t tmpfs -o size=200k none "$1" && head -c 190k /dev/zero > "$1/full"; '
    script += 'exec "$2" -c "$3" "$1"'
    done = run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL]
    )
    assert done.stdout == "SandboxError free some space\n['full']\n", done


async def test_files_leave_memory_for_processes(tmp_path: Path) -> None:
    """Where what is written counts as memory, it must not take all of it."""
    backend = local.build(local.Options())
    limits = Limits(memory_mib=64, num_processes=32, disk_mib=4096, lifetime_s=60)
    async with backend.open("host", limits, workdir="/testbed") as sandbox:
        if "memory" not in sandbox.limits:
            pytest.skip("no cgroup bounds a sandbox's memory here")
        for _ in range(2):
            await sandbox.run(["sh", "-c", "cat /dev/zero > /tmp/big"])
            with pytest.raises(SandboxError) as raised:
                await sandbox.write("/tmp/more", bytes(8 << 20))
            assert not isinstance(raised.value, SandboxLostError)
        assert await sh(sandbox, "rm /tmp/big && echo still here") == "still here\n"
