"""A few random faults of bench/chaos.py; `nox -s chaos` makes 300."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_run_under_random_faults_loses_nothing_and_leaves_nothing() -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    command = [sys.executable, str(ROOT / "bench" / "chaos.py"), "--seed", "1"]
    sizes = ["--faults", "3", "--each", "3", "--steps", "1"]
    # They need no root, and their order follows from the seed.
    sizes += ["--kinds", "controller", "engine", "rank", "spawner", "supervisor"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=1200)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 faults: nothing lost, nothing left" in done.stdout
