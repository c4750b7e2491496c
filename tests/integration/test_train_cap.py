"""`cost.max_dollars` whole, on real parts: the run ends at its cap, is refused, and goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_train import RECIPE, Run

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

PRICED = """
[cost]
max_dollars = 1e-6
[cost.prices]
local_vcpu_second = 0.01
"""


def test_a_run_ends_at_its_cap_is_refused_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    small = RECIPE.replace("steps = 6", "steps = 2", 1).replace(
        "num_heldout = 3", "num_heldout = 1"
    )
    run.recipe.write_text(small.replace("num_unseen = 2", "num_unseen = 0") + PRICED)

    # The cap is watched every few seconds: it ends the run within the first step, or after it.
    code, output = run.finish()
    assert code in (0, 130), output
    assert "are spent of cost.max_dollars = 1e-06" in output
    assert "stopped" in output
    before = {path: path.stat().st_mtime_ns for path in run.episodes()}

    code, output = run.finish()
    assert code == 1, output
    assert re.search(r"this run has spent \$0\.\d\d of cost\.max_dollars", output)
    assert "--set cost.max_dollars=" in output

    code, output = run.finish("--set", "cost.max_dollars=1000")
    assert code == 0, output
    assert "reward by step" in output
    assert run.state()["finished"]
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    first, second = dollars(run)
    assert second > first > 0
    assert status(run)["dollars"]["run"] == second


def status(run: Run) -> dict[str, Any]:
    """Return what `swerl train status` says of the run."""
    command = [sys.executable, "-m", "swerl", "train", "status", "small", "--json"]
    done = subprocess.run(
        [*command, "--runs", str(run.root.parent)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def dollars(run: Run) -> list[float]:
    """Return what the run had cost after each step."""
    events = map(json.loads, (run.root / "events.jsonl").read_text().splitlines())
    return [event["metrics"]["dollars"] for event in events if event["event"] == "StepEnded"]
