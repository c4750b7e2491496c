"""bench/gpu.py runs whole in small, so that its first run on a GPU does not fail on a name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SLOW_PIECE = """#!/bin/sh
echo 'NCCL version 2'
echo '{"forward_s": 1.5}'
sleep 100 &
echo $! > "$(dirname "$0")/child"
wait
"""
"""Stands for a piece that hangs, with a child, after its first figure."""


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


def test_a_machine_without_a_gpu_is_refused_without_small(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, "bench/gpu.py", "--only", "ipc", f"--json={tmp_path / 'gpu.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--small" in done.stderr


def test_a_piece_that_hangs_ends_with_its_children_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gpu = importlib.import_module("gpu")
    slow = tmp_path / "python"
    slow.write_text(SLOW_PIECE)
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setitem(gpu.LIMITS_S, "layers", 15)
    found = gpu.run("layers", small=True)
    assert found["forward_s"] == 1.5
    assert "longer than 15 s" in found["error"]
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    state = (child / "stat").read_text().split()[2] if child.exists() else "gone"
    assert state in {"gone", "Z"}
