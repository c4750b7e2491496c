"""bench/gpu.py runs whole in small, so that its first run on a GPU does not fail on a name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
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
