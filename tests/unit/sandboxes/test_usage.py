"""Memory and disk usage that a sandbox reports."""

from __future__ import annotations

import pytest

from swerl.core.contracts import MeteredSandbox
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

from .helpers import WORKDIR, sh

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
FILL = "head -c 20000000 /dev/zero >filled; python3 -c 'bytearray(80 << 20)'"


async def test_the_local_sandbox_reports_its_usage() -> None:
    async with local.build(local.Options()).open("host", LIMITS, workdir=WORKDIR) as sandbox:
        assert isinstance(sandbox, MeteredSandbox)
        before = await sandbox.usage()
        await sh(sandbox, FILL)
        after = await sandbox.usage()
        if "memory" not in sandbox.limits:
            assert after.peak_memory_mib is None
            pytest.skip("this machine counts no sandbox's memory")
    assert before.disk_mib is not None
    assert after.disk_mib is not None
    assert 18 < after.disk_mib - before.disk_mib < 24
    assert before.peak_memory_mib is not None
    assert after.peak_memory_mib is not None
    assert before.peak_memory_mib < 80 < after.peak_memory_mib <= 256
