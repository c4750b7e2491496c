"""The scripts of a first GPU run work whole and small on a CPU, so that none fails on a name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]


def test_a_learner_alone_in_its_process() -> None:
    """A learner's tests change their process for good, so they run in one of their own."""
    file = Path(__file__).parent / "rank" / "learner_alone.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_every_piece_runs_in_small(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "bench/gpu.py", "--small", f"--json={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads(out.read_text())
    assert found["step"]["mfu_of_measured_rate"] > 0
    assert found["layers"]["linear_attention"]["forward_s"] > 0
    assert found["sleep"]["weights_bit_equal"]
    assert found["ipc"]["sum_equal"] and found["ipc"]["memory_is_shared"]
    # The same weights and rows: only bf16's rounding is between them.
    assert found["numerics"]["logprob_difference_mean"] < 0.02
    assert found["numerics"]["grad_norm_relative"] < 0.05
