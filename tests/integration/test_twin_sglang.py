"""The twin's whole loop with its policy in real SGLang, its weights sent by a broadcast.

Needs an interpreter with SGLang in SWERL_SGLANG_PYTHON; skips without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.sglang_cpu.interpreter import sglang_python

UPDATES = 5
SETTINGS = {
    "engine.type": "sglang",
    "cluster.weight_sync": "distributed",
    "steps": str(UPDATES),
    "rollout.groups_per_step": "2",
    "rollout.episodes_per_group": "2",
    "tasks.num_train": "8",
    "tasks.num_heldout": "1",
    "tasks.num_unseen": "0",
    "model.warm_start_steps": "2",
    # So short a warm start earns no reward; the weights move all the same, by a percent a step.
    "trainer.weight_decay": "1.0",
    "trainer.lr": "0.01",
    "trainer.warmup_steps": "0",
    "budgets.model_call_s": "300",
    "budgets.tool_s": "400",
    "budgets.agent_s": "900",
    "budgets.grading_s": "1000",
    "budgets.episode_s": "3600",
    "budgets.sandbox_s": "7200",
}


def test_the_twin_trains_on_sglang(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "twin_cpu.toml"
    settings = SETTINGS | {"engine.python": str(sglang_python())}
    command = [sys.executable, "-m", "swerl", "train", str(recipe)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    events = [json.loads(line) for line in (tmp_path / "runs/twin/events.jsonl").open()]
    steps = [event["metrics"] for event in events if "metrics" in event]
    assert len(steps) == UPDATES
    assert max(step["mismatch"] for step in steps) <= 1e-4
    assert all(step["stale_tokens"] == 0 and step["trained_tokens"] for step in steps)
    assert not [event for event in events if "checksum" in str(event)]  # every one was confirmed
