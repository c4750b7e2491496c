"""Attacks on the kernel, the network and visible processes: a table of programs, as both users.

Each program tries several things as the sandbox's ordinary user and as its root.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .box import USERS, Box, new_word, worked
from .weak import WeakBackend

PROGRAMS = (
    "network.routes", "network.special_sockets", "network.configure",
    "kernel.write_settings", "kernel.read_secrets", "kernel.write_sys", "kernel.make_groups",
    "kernel.open_devices",
    "powers.mount", "powers.namespaces", "powers.administer", "powers.rare_calls",
    "powers.make_devices",
    "processes.descriptors",
)  # fmt: skip
DEPENDING = {"network.routes", "kernel.make_groups", "kernel.open_devices", "powers.make_devices"}
"""Programs that succeed only on machines with such a part."""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("program", PROGRAMS)
async def test_it_fails(box: Box, program: str, user: str | None) -> None:
    assert worked(await box.attack(program, user=user)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has these powers without a sandbox")
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in DEPENDING])
async def test_it_works_without_a_sandbox(program: str, tmp_path: Path) -> None:
    backend = WeakBackend()
    async with backend.open("host", None, workdir=str(tmp_path)) as sandbox:  # type: ignore[arg-type]
        assert worked(await Box(sandbox, backend, str(tmp_path)).attack(program))


async def test_setuid_programs_give_no_power(box: Box) -> None:
    make = 'cp "$(command -v id)" /tmp/id && chmod 4755 /tmp/id'
    await box.sh(make, user="root")
    done = await box.sh("id -u; /tmp/id -u; sudo -n id -u; su -c 'id -u' </dev/null")
    assert "0" not in done.stdout.decode().split()


async def test_no_namespace_is_the_hosts(box: Box) -> None:
    for kind in ("pid", "net", "mnt", "ipc", "uts"):
        inside = (await box.sh(f"readlink /proc/self/ns/{kind}")).text.strip()
        assert inside != str(Path(f"/proc/self/ns/{kind}").readlink()), kind
    assert worked(await box.attack("powers.enter", 1, user="root")) == []


async def test_a_key_does_not_reach_the_next_sandbox(box: Box) -> None:
    word = new_word()
    await box.attack("powers.leave_key", word)
    async with box.other() as other:
        assert worked(await other.attack("powers.find_key", word)) == []
