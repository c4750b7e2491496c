"""Conformance of every sandbox backend: isolation."""

from __future__ import annotations

import os
import socket

import pytest

from swerl.core.contracts import Sandbox

from .helpers import Target, processes, sh


async def test_there_is_no_network_but_loopback(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "ls /proc/sys/net/ipv4/conf") == "all\ndefault\nlo\n"
    assert len((await sh(sandbox, "cat /proc/net/route")).splitlines()) <= 1


async def test_the_hosts_loopback_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        done = await sandbox.run(["python3", "-c", script])
    assert b"ConnectionRefusedError" in done.stderr


async def test_the_hosts_abstract_sockets_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0swerl-test-{os.getpid()}"
        server.bind(name)
        server.listen()
        script = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        done = await sandbox.run(["python3", "-c", script])
    assert b"ConnectionRefusedError" in done.stderr


async def test_host_folders_are_hidden(sandbox: Sandbox, host_secret: str) -> None:
    assert (await sandbox.run(["cat", host_secret])).exit_code == 1
    assert (await sandbox.run(["cat", "/etc/shadow"])).exit_code == 1
    assert await sh(sandbox, "ls -A /home") == "agent\n"
    here = os.path.dirname(__file__)  # noqa: PTH120
    assert (await sandbox.run(["ls", here])).exit_code == 2


async def test_host_processes_are_hidden(sandbox: Sandbox) -> None:
    pids = [int(name) for name in (await sh(sandbox, "ls /proc")).split() if name.isdigit()]
    assert len(pids) <= 10
    assert (await sandbox.run(["kill", "-0", str(os.getpid())])).exit_code == 1


async def test_a_changed_program_is_changed_in_this_sandbox_only(target: Target) -> None:
    """Where a sandbox may change programs at all, it changes its own copy."""
    size = os.stat("/usr/bin/env").st_size  # noqa: PTH116
    async with target.open() as one:
        for path in ("/usr/bin/env", "/usr/new"):
            await one.run(["sh", "-c", f"echo x >> {path}"], user="root")
    async with target.open() as two:
        assert (await two.run(["env", "true"])).exit_code == 0
        assert (await two.run(["ls", "/usr/new"])).exit_code == 2
    assert os.stat("/usr/bin/env").st_size == size  # noqa: PTH116
    assert not os.path.exists("/usr/new")  # noqa: PTH110


async def test_kernel_settings_cannot_be_changed(sandbox: Sandbox) -> None:
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/swappiness"):
        assert (await sandbox.run(["sh", "-c", f"cat {path} > {path}"], user="root")).exit_code != 0


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_no_user_has_a_capability_or_can_gain_one(sandbox: Sandbox, user: str) -> None:
    text = await sh(sandbox, "grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status", user=user)
    facts = dict(line.split(":\t") for line in text.splitlines())
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[kind], 16) == 0
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize(
    "command",
    [
        ["mount", "-t", "tmpfs", "none", "/tmp"],
        ["unshare", "-Ur", "true"],
        ["chroot", "/tmp"],
        ["python3", "-c", "import socket; socket.socket(40, socket.SOCK_STREAM)"],
        ["python3", "-c", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"],
        ["mknod", "/tmp/disk", "b", "8", "0"],
    ],
    ids=["mount", "new-namespace", "chroot", "vsock", "raw-socket", "device-node"],
)
async def test_privileged_calls_are_refused(sandbox: Sandbox, command: list[str]) -> None:
    done = await sandbox.run(command, user="root", timeout_s=10)
    assert done.exit_code != 0
    assert b"not permitted" in done.stderr or b"denied" in done.stderr


async def test_sandboxes_share_nothing(target: Target) -> None:
    async with target.open() as one, target.open() as two:
        assert one.id != two.id
        await sh(one, "echo 1 > f; echo 1 > /tmp/f; echo 1 > ~/f; sleep 64 >/dev/null 2>&1 &")
        assert await sh(two, "ls /testbed /home/agent /tmp | grep -c '^f$' || true") == "0\n"
        assert await processes(two, "sleep 64") == 0
    async with target.open() as three:
        assert await sh(three, "ls -A") == ""
