"""A few random faults of bench/chaos.py; `nox -s nightly` makes 550."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def chaos(*arguments: str) -> None:
    command = [sys.executable, str(ROOT / "bench" / "chaos.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: nothing lost, nothing left" in done.stdout


def test_a_run_under_random_faults_loses_nothing_and_leaves_nothing() -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    sizes = ["--faults", "3", "--each", "3", "--steps", "1", "--seed", "1"]
    # They need no root, and their order follows from the seed.
    chaos(*sizes, "--kinds", "controller", "engine", "rank", "spawner", "supervisor")


@pytest.mark.nightly
@pytest.mark.parametrize("service", ["docker", "registry", "server"])
def test_a_service_that_fails_becomes_no_result(
    service: str, request: pytest.FixtureRequest
) -> None:
    # Skip where it cannot run.
    if service == "server":
        pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    else:
        request.getfixturevalue("dockerd" if service == "docker" else service)
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    chaos("--service", service, "--faults", "3", "--each", "3", "--seed", "1")
