"""A Ray cluster for one run on a host list; the host is this machine.

There is no ssh server here: a stand-in takes what ssh takes, a host and a command for its shell,
and runs it as sshd does, with its standard input open until the other side closes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from swerl.cluster import hosts
from swerl.cluster.hosts import HostPlan, _address_towards, _member
from swerl.cluster.join import clear
from swerl.cluster.node import address_towards
from swerl.core.errors import ClusterError

RECIPE = """
name = "hosts"
[trainer]
ranks = 1
[cluster]
launcher = "ssh"
nodes = 1
hosts = ["127.0.0.1"]
ssh = ["{ssh}"]
"""
# What a run does whose rank was lost: it opens its machines a second time.
TWICE = """
import asyncio, os, sys
from pathlib import Path
from swerl.cluster.open import open_nodes
from swerl.recipe.load import load

async def main() -> None:
    for _ in range(2):
        async with open_nodes(load([Path(sys.argv[1])]), Path(sys.argv[2])) as nodes:
            (node,) = nodes.trainer
            print(await node.call(os.getppid) != os.getpid(), flush=True)

asyncio.run(main())
"""
SSH = '#!/bin/sh\nshift\nexec sh -c "$*"\n'
CLOSED = "#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n"


def _program(folder: Path, text: str) -> Path:
    program = folder / "ssh"
    program.write_text(text)
    program.chmod(0o755)
    return program


def _processes(marker: str) -> list[str]:
    """Return the command lines of what runs with this in its environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.slow
def test_a_host_list_becomes_a_cluster_repeatedly_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="needs the extra swerl[cluster]")
    recipe = tmp_path / "hosts.toml"
    recipe.write_text(RECIPE.format(ssh=_program(tmp_path, SSH)))
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(recipe), str(tmp_path)],
        env={**os.environ, "SWERL_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "True\nTrue\n"
    assert not _processes(str(tmp_path / "cache"))


async def test_a_host_that_refuses_is_named_with_its_own_words(tmp_path: Path) -> None:
    program = _program(tmp_path, CLOSED)
    plan = HostPlan(("gpu1",), (str(program),), tmp_path, gpus_per_node=0, cpus_per_node=1)
    with pytest.raises(ClusterError, match=r"host gpu1 did not join .*Permission denied") as error:
        async with _member(plan, "gpu1", {"head": "127.0.0.1:9"}):
            pass
    assert "ray-gpu1.log" in error.value.hint


def test_the_head_has_an_address_that_the_other_machines_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first host of a Slurm job is this machine, whose name is often a loopback address here.
    routes = {"here": "127.0.1.1", "there": "192.0.2.1", "far": "192.0.2.1"}
    monkeypatch.setattr(hosts, "address_towards", routes.__getitem__)
    assert _address_towards(("here", "root@there", "far")) == "192.0.2.1"
    assert _address_towards(("here",)) == "127.0.1.1"


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ClusterError, match=r"host nowhere\.invalid is unknown") as error:
        _address_towards(("127.0.0.1", "nowhere.invalid"))
    assert "cluster.head_address" in error.value.hint
    assert address_towards("localhost") == "127.0.0.1"


def test_a_member_clears_its_machine_but_not_the_heads(tmp_path: Path) -> None:
    folder = tmp_path / "swerl-ray"
    folder.mkdir()
    clear(folder, here="192.0.2.1", head="192.0.2.1:6379")
    assert folder.exists()
    clear(folder, here="192.0.2.2", head="192.0.2.1:6379")
    assert not folder.exists()
