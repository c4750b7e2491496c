"""After `kill -9` of controllers at random moments, `reap` leaves nothing of theirs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl.core import plugins
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxUnavailableError
from swerl.core.sandbox import Limits
from swerl.sandboxes.ledger import Entry, Ledger, Outcome, reap

CONTROLLERS = Path(__file__).parent / "plugin" / "controllers.py"
SEED = 20261120
AT_ONCE = 3


@dataclass(frozen=True)
class Case:
    """A backend to crash on."""

    backend: str
    settings: dict[str, object]
    image: str
    num_kills: int
    pause_s: float
    """Mean seconds between kills: a boot or less."""

    def build(self) -> SandboxBackend:
        module = plugins.load("sandboxes", self.backend)
        built: SandboxBackend = module.build(module.Options(**self.settings))
        return built


@pytest.fixture(params=["local", "docker", "e2b"])
def case(request: pytest.FixtureRequest) -> Case:
    match request.param:
        case "local":
            return Case("local", {}, "host", 50, 0.1)
        case "docker":
            base_url = request.getfixturevalue("dockerd")
            image = request.getfixturevalue("docker_image")
            return Case("docker", {"base_url": base_url}, image, 12, 0.3)
        case _:
            pytest.importorskip("e2b", reason="the package `e2b` is not installed")
            url = request.getfixturevalue("e2b_url")
            urls = {"api_url": url, "sandbox_url": url}
            return Case("e2b", {**urls, "price_per_hour": 1.0}, "base", 15, 0.15)


@pytest.fixture
def e2b_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of `swerl sandbox serve` over local sandboxes."""
    key = tmp_path / "key"
    key.write_text("e2b_" + "0" * 40)
    monkeypatch.setenv("E2B_API_KEY", key.read_text())
    argv = [sys.executable, "-m", "swerl.cli", "sandbox", "serve"]
    argv += ["--listen", "127.0.0.1:0", "--api-key-file", str(key)]
    env = {**os.environ, "SWERL_STATE": str(tmp_path / "server")}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        yield found[0]
        server.terminate()


async def test_nothing_is_left_after_reap(case: Case, ledger: Ledger) -> None:
    try:
        async with case.build().open(case.image, Limits(), workdir="/tmp/w"):
            pass
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")
    pids = crash(case, ledger)
    left = unfinished(ledger)
    assert any(not entry.opened_s for entry in left), "some were killed within a create"
    assert any(entry.opened_s for entry in left), "and some later"

    results = await reap(ledger, run="crash")
    assert [result for result in results if result.outcome is Outcome.FAILED] == []

    theirs = tuple(f"swerl-{pid}-" for pid in pids)
    live = [each.name for each in await case.build().live()]
    assert [name for name in live if name.startswith(theirs)] == []
    # A paid one that was being created may appear later: reap will look for it again.
    assert [entry for entry in unfinished(ledger) if entry.opened_s or not entry.price] == []
    if case.backend != "e2b":  # what its server runs on is the server's own matter
        for what, left in leftovers(theirs).items():
            assert left == [], what


def unfinished(ledger: Ledger) -> list[Entry]:
    return [entry for entry in ledger.read() if not entry.ended_s]


def crash(case: Case, ledger: Ledger) -> list[int]:
    """Keep a few controllers at work and kill one after the other, in one of three ways."""
    chance = random.Random(SEED)
    argv = [sys.executable, CONTROLLERS, case.backend, json.dumps(case.settings), case.image]
    living: list[int] = []
    killed: list[int] = []
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin
        assert nursery.stdout
        while len(killed) < case.num_kills:
            while len(living) < AT_ONCE:
                nursery.stdin.write("\n")
                nursery.stdin.flush()
                living.append(int(nursery.stdout.readline()))
            time.sleep(chance.random() * 2 * case.pause_s)
            pid = living.pop(chance.randrange(AT_ONCE))
            chance.choice([kill, kill_group, kill_tree])(pid)
            killed.append(pid)
        wait_for_one_in_use(ledger, living)
        for pid in living:
            kill(pid)
        nursery.stdin.close()
    return killed + living


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process and, at the same moment, everything that it started."""
    below = started_by(pid)
    for child in (pid, *below):
        with suppress(ProcessLookupError):
            kill(child)


def started_by(pid: int) -> list[int]:
    """Return the processes below this one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *started_by(child))]


def wait_for_one_in_use(ledger: Ledger, pids: list[int]) -> None:
    """Wait until one of these processes has an open sandbox, however slow the machine is."""
    for _ in range(600):
        if any(each.opened_s and each.owner.pid in pids for each in unfinished(ledger)):
            return
        time.sleep(0.05)
    pytest.fail("no sandbox opened within 30 s")


def leftovers(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return what this machine still has of sandboxes whose names begin so."""
    found: dict[str, list[str]] = {"mounts": [], "cgroups": [], "processes": [], "sockets": []}
    words = re.compile("|".join(map(re.escape, names)))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        found["mounts"] += [line] * bool(words.search(line))
    for folder, children, _ in os.walk("/sys/fs/cgroup"):
        found["cgroups"] += [f"{folder}/{name}" for name in children if words.match(name)]
    for line in Path("/proc/net/unix").read_text().splitlines():
        found["sockets"] += [line] * bool(words.search(line))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cgroup").read_text() + (process / "cmdline").read_text()
            said += (process / "mountinfo").read_text()
        except OSError:
            continue
        found["processes"] += [f"{process.name}: {said[:300]}"] * bool(words.search(said))
    return found
