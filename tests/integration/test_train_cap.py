"""`cost.max_dollars` whole, on real parts: the run ends at its cap, is refused, and goes on."""

from __future__ import annotations

import json
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

    code, output = run.finish()
    assert code == 0, output
    assert "are spent of cost.max_dollars = 1e-06" in output
    assert "stopped after step 1 of 2, for cost.max_dollars" in output
    assert (run.state()["step"], run.state()["finished"]) == (1, False)
    assert (run.root / "checkpoints" / "00001" / "meta.json").exists()
    [first] = dollars(run)
    assert status(run)["dollars"]["run"] == first
    before = {path: path.stat().st_mtime_ns for path in run.episodes()}

    code, output = run.finish()
    assert code == 1
    assert f"this run has spent ${first:,.2f} of cost.max_dollars" in output
    assert "--set cost.max_dollars=" in output

    code, output = run.finish("--set", "cost.max_dollars=1000")
    assert code == 0, output
    assert "reward by step" in output
    assert run.state()["finished"]
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    again, second = dollars(run)
    assert again == first
    assert second > first > 0


def status(run: Run) -> dict[str, Any]:
    """Return what `swerl train status` says of the run."""
    command = [sys.executable, "-m", "swerl.cli", "train", "status", "small", "--json"]
    done = subprocess.run(
        [*command, "--runs", str(run.root.parent)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def dollars(run: Run) -> list[float]:
    """Return what the run had cost after each step."""
    events = map(json.loads, (run.root / "events.jsonl").read_text().splitlines())
    return [event["metrics"]["dollars"] for event in events if event["event"] == "StepEnded"]
