"""A Ray cluster of the run's own on a host list; the hosts are this machine, twice.

There is no ssh server here: a stand-in takes what ssh takes, a host and a command for its shell,
and runs it as sshd does, with its standard input open until the other side closes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RECIPE = """
name = "hosts"
[trainer]
ranks = 2
[cluster]
launcher = "ssh"
nodes = 2
hosts = ["127.0.0.1", "127.0.0.1"]
ssh = ["{ssh}"]
"""
SSH = '#!/bin/sh\nshift\nexec sh -c "$*"\n'
CLOSED = "#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n"


def _preflight(folder: Path, ssh: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ray", reason="needs the extra swerl[cluster]")
    program = folder / "ssh"
    program.write_text(ssh)
    program.chmod(0o755)
    (folder / "hosts.toml").write_text(RECIPE.format(ssh=program))
    command = [sys.executable, "-m", "swerl.cli", "train", "preflight", str(folder / "hosts.toml")]
    return subprocess.run(
        [*command, "--runs", str(folder / "runs"), "--json"],
        env={**os.environ, "SWERL_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=560,
    )


def _processes(marker: str) -> list[str]:
    """Return the command lines of what runs with this in its environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
    return found


def test_a_host_list_becomes_a_cluster_that_is_gone_afterwards(tmp_path: Path) -> None:
    done = _preflight(tmp_path, SSH)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert all(each["state"] == "ok" for each in found), found
    assert len({each["node"] for each in found if each["check"] == "torch"}) == 2
    assert [each["found"][:13] for each in found if each["check"] == "all-reduce"] == [
        "gloo, 2 ranks"
    ]
    assert not _processes(str(tmp_path / "cache"))


def test_a_host_that_refuses_is_named_with_its_own_words(tmp_path: Path) -> None:
    done = _preflight(tmp_path, CLOSED)
    assert done.returncode == 1
    assert "host 127.0.0.1 did not join" in done.stderr
    assert "Permission denied (publickey)" in done.stderr
    assert not _processes(str(tmp_path / "cache"))
