"""The `local` backend on machines that lack something, with a full disk, and unprivileged."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.liveness import pid_namespace
from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from swerl.sandboxes._local import limits

from . import other_user
from .helpers import eventually, sh

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
ROOT = Path(__file__).resolve().parents[3]
PYTHONPATH = ":".join(filter(None, sys.path))


CROWDED = """
import asyncio, sys
FILL = "b'x' * (300 << 20)"
from swerl.core.errors import SandboxLostError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

async def main():
    limits = Limits(memory_mib=int(sys.argv[1]), disk_mib=16, lifetime_s=60)
    try:
        async with local.build(local.Options()).open("host", limits, workdir="/w") as sandbox:
            print((await sandbox.run(["python3", "-c", FILL])).exit_code)
    except SandboxLostError as error:
        print(error.from_inside, error)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("memory_mib", "printed"), [(64, "137"), (2048, "False sandbox .* ran out of memory")]
)
def test_a_command_killed_for_memory_that_others_used_is_a_lost_sandbox(
    memory_mib: int, printed: str
) -> None:
    """The kernel kills a sandbox's process first; exit code 137 would count as its own fault."""
    parent = limits.find().get("memory")
    if parent is None:
        pytest.skip("this user cannot create a memory cgroup")
    group = parent / f"crowded-{os.getpid()}"
    group.mkdir()
    try:
        is_new = (group / "memory.max").exists()
        (group / ("memory.max" if is_new else "memory.limit_in_bytes")).write_text(str(200 << 20))
        enter = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        argv = ["sh", "-c", enter, str(group), sys.executable, "-c", CROWDED, str(memory_mib)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    finally:
        group.rmdir()

    assert re.match(printed, done.stdout), done.stdout + done.stderr


async def test_a_machine_without_user_namespaces_is_named_and_no_full_disk() -> None:
    class Refused:
        id = "a"

        async def boot(self) -> None:
            raise OSError(errno.ENOSPC, "unshare: No space left on device")

    with pytest.raises(SandboxUnavailableError, match="user namespaces do not work") as caught:
        await local._boot(Refused())  # type: ignore[arg-type]
    for remedy in ("user.max_user_namespaces", "seccomp=unconfined", "sandbox.type=docker"):
        assert remedy in caught.value.hint


def test_another_system_than_linux_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="need Linux"):
        local.build(local.Options()).open("host", LIMITS, workdir="/w")


async def test_a_scratch_folder_is_used_and_emptied(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    dead = scratch / f"swerl-999999999-{pid_namespace()}dead"
    dead.mkdir()
    backend = local.build(local.Options(scratch=scratch))
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        await sandbox.write("/testbed/f", b"on disk")
        assert [path.name for path in scratch.iterdir()] == [sandbox.id]
        assert await sh(sandbox, "cat f") == "on disk"
    await eventually(lambda: not list(scratch.iterdir()))


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
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(argv, env=environment, cwd="/", capture_output=True, text=True)  # noqa: ASYNC221
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


UNPRIVILEGED = (
    *(f"conformance_{name}" for name in ("commands", "end", "files", "isolation", "limits")),
    *(f"local_{name}" for name in ("fault", "init", "live", "oci", "proc")),
)


@pytest.mark.integration
def test_conformance_and_walls_hold_as_an_unprivileged_user() -> None:
    done = subprocess.run(
        [
            *(*other_user.command(), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--basetemp", f"/tmp/swerl-unprivileged-{os.getpid()}"),
            *(f"tests/unit/sandboxes/test_{name}.py" for name in UNPRIVILEGED),
        ],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
