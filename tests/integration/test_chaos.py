"""Faults of processes (bench/chaos.py) and of sandbox services; `nox -s nightly` makes 350."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.sandboxes import e2b
from swerl.sandboxes.e2b_server.access import new_key
from tests.services import dockerd, image
from tests.unit.grading.conftest import GOLD

ROOT = Path(__file__).resolve().parents[2]
SWERL = [sys.executable, "-m", "swerl"]
SETUP = """
printf 'def add(a, b):\\n    return a - b\\n' >calc.py
git init -q . && git add . && git -c user.name=t -c user.email=t@localhost commit -qm base
sleep 1
"""
TEST = "python3 -c 'import time, calc; time.sleep(1); assert calc.add(2, 3) == 5'"
NUM_TASKS, ATTEMPTS, NUM_FAULTS, MAX_STARTS = 2, 3, 3, 20


def test_a_run_under_random_faults_loses_nothing_and_leaves_nothing() -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    sizes = ["--faults", "3", "--each", "3", "--steps", "1", "--seed", "1"]
    # They need no root, and their order follows from the seed.
    kinds = ["controller", "engine", "rank", "spawner", "supervisor"]
    command = [sys.executable, str(ROOT / "bench" / "chaos.py"), *sizes, "--kinds", *kinds]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1200)

    assert process.returncode == 0, process.stdout + process.stderr
    assert "faults: nothing lost, nothing left" in process.stdout


@dataclass
class Service:
    """A service of sandboxes, and the faults that it suffers."""

    image: str
    settings: list[str]
    faults: list[Callable[[], None]]
    mend: Callable[[], None]


@contextmanager
def docker_service(folder: Path) -> Iterator[Service]:
    import docker

    daemon = dockerd.start()

    def mend() -> None:
        nonlocal daemon
        if daemon.process.poll() is not None:
            daemon = dockerd.start_again(daemon)

    def end(number: int) -> None:
        daemon.process.send_signal(number)
        daemon.process.wait(60)
        mend()

    try:
        base = image.build(folder)
        client = docker.APIClient(base_url=daemon.address, timeout=60)
        client.load_image(base.archive.read_bytes())
        settings = [f"sandbox.base_url={daemon.address}", "sandbox.type=docker"]
        faults = [lambda: end(signal.SIGKILL), lambda: end(signal.SIGTERM)]
        freeze = [lambda: pause(daemon.process)]
        yield Service(base.name, [*settings, "sandbox.user=root"], faults + freeze, mend)
        assert not client.containers(all=True)
    finally:
        daemon.stop()


@contextmanager
def sandbox_server(folder: Path) -> Iterator[Service]:
    (folder / "image").mkdir()
    (folder / "key").write_text(new_key())
    os.environ[e2b.KEY] = (folder / "key").read_text()
    command = [*SWERL, "sandbox", "serve", "--api-key-file", f"{folder}/key"]
    command += ["--template", f"base=dir:{folder}/image", "--set", "limits.memory_mib=512"]
    port = 0

    def start() -> subprocess.Popen[str]:
        nonlocal port
        listen = ["--listen", f"127.0.0.1:{port}"]
        started = subprocess.Popen([*command, *listen], stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None
        port = int(started.stdout.readline().rpartition(":")[2])
        return started

    server = start()

    def mend() -> None:
        nonlocal server
        if server.poll() is not None:
            server = start()

    def end(number: int) -> None:
        server.send_signal(number)
        server.wait(60)
        mend()

    url = f"http://127.0.0.1:{port}"
    settings = [f"sandbox.api_url={url}", f"sandbox.sandbox_url={url}", "sandbox.type=e2b"]
    faults = [lambda: end(signal.SIGKILL), lambda: end(signal.SIGTERM), lambda: pause(server)]
    try:
        yield Service("base", settings, faults, mend)
    finally:
        server.terminate()
        server.wait(60)


def pause(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["docker", "server"])
def test_a_service_that_fails_becomes_no_result(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Skip where it cannot run.
    if name == "server":
        pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    else:
        request.getfixturevalue("dockerd")
        if not shutil.which("skopeo"):
            pytest.skip("skopeo is not installed")
    (tmp_path / "service").mkdir()
    service_of = docker_service if name == "docker" else sandbox_server
    with service_of(tmp_path / "service") as service:
        spec = GradingSpec("command", test_command=TEST)
        tasks = [
            Task(
                f"t-{n}",
                "r",
                service.image,
                "/repo",
                "Mend add.",
                spec,
                gold_patch=GOLD,
                setup=SETUP,
            )
            for n in range(NUM_TASKS)
        ]
        write_tasks(tmp_path / "tasks.jsonl", tasks)

        num_solved = _attempt_under_faults(tmp_path, service)

    assert num_solved == NUM_TASKS * ATTEMPTS


def _attempt_under_faults(folder: Path, service: Service) -> int:
    """Repeat an evaluation of known solutions until all are solved; return their number."""
    limits = ["limits.memory_mib=512", "limits.disk_mib=512", "rollout.concurrency=2"]
    settings = [*service.settings, *limits]
    command = [*SWERL, "eval", str(folder / "tasks.jsonl"), "--engine", "scripted:gold"]
    command += ["--attempts", str(ATTEMPTS), "--runs", str(folder / "runs")]
    command += [word for setting in settings for word in ("--set", setting)]
    env = {**os.environ, "SWERL_CACHE": str(folder / "c"), "SWERL_STATE": str(folder / "s")}
    solved: dict[Path, bytes] = {}
    faults = service.faults[:NUM_FAULTS]
    for _ in range(MAX_STARTS):
        process = subprocess.Popen(command, env=env)
        while faults and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(4)
                break
            faults.pop()()
        process.wait(600)
        service.mend()
        subprocess.run([*SWERL, "sandbox", "reap"], env=env, check=True)
        for path, data in solved.items():
            assert path.read_bytes() == data, "a finished Episode stays as it is"
        for path in (folder / "runs").glob("*/episodes/*/*/episode.json"):
            verdict = json.loads(path.read_text())["verdict"]
            assert verdict in ("solved", "infra"), path
            if verdict == "solved":
                solved.setdefault(path, path.read_bytes())
        if len(solved) == NUM_TASKS * ATTEMPTS and not faults:
            break
    return len(solved)
