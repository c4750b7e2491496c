"""On a disk that is really full, nothing paid is created, and free sandboxes go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Machines

SCRIPT = """
import asyncio, os, sys
from pathlib import Path
import folder_machines
from swerl.core.errors import SandboxError
from swerl.sandboxes.ledger import default_ledger, tracked
from swerl.core.sandbox import Limits

disk, heard, opened = Path(sys.argv[1]), [], []

async def use(price):
    options = folder_machines.Options(folder=sys.argv[2], price=price)
    backend = tracked("folder", options, run="r", warn=heard.append)
    async with backend.open("img", Limits(), workdir="/w"):
        opened.append(price)
    return backend

async def main():
    backend = await use(0.0)
    with open(disk / "ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"x" * 512)
        except OSError:
            pass
    try:
        await use(1.0)
    except SandboxError as error:
        print("refused:", error)
    for _ in range(30):
        async with backend.open("img" * 500, Limits(), workdir="/w"):
            opened.append(0.0)
    (disk / "ballast").unlink()
    await use(1.0)
    async with backend.open("after", Limits(), workdir="/w"):
        pass
    print("warned", len(heard), "opened", len(opened))
    print("known", sum(entry.image == "after" for entry in default_ledger().read()))

asyncio.run(main())
"""


def test_a_full_disk(machines: Machines, tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounting a small disk takes root and `unshare`")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=256k none "$1" && SWERL_STATE="$1" exec "$2" -c "$3" "$1" "$4"'
    argv = ["unshare", "-m", "sh", "-c", mount, "sh", str(disk), sys.executable, SCRIPT]
    done = subprocess.run(
        [*argv, str(machines.folder)], capture_output=True, text=True, check=False
    )
    if "permission denied" in done.stderr.lower():
        pytest.skip(f"this machine forbids mounts: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    refused, counts, known = done.stdout.splitlines()
    assert refused.startswith("refused: no paid sandbox without a record of it")
    assert "disk is full" in refused
    assert counts == "warned 1 opened 32"
    assert known == "known 1"
