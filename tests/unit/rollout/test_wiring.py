"""The rollout parts of a recipe: a single Episode imports no trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROLLOUT = """
import json, sys
sys.argv = ["swerl", "rollout", "--engine", "scripted:gold", "--json"]
from swerl.__main__ import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(json.dumps(sorted(name for name in sys.modules if name.startswith("swerl."))))
"""
ABSENT = ("swerl.cluster", "swerl.plan", "swerl.training", "swerl.sandboxes.e2b_server")
"""Rooms that an Episode without a trainer never imports."""
UNUSED = (
    "swerl.engines.families._megatron_mapping",
    "swerl.grading.expectations",
    "swerl.grading.languages",
    "swerl.grading.plausible",
    "swerl.grading.runner_logs",
)
"""Modules that an Episode of the twin does not use, and that take long to import."""


def test_a_single_rollout_imports_no_cluster_trainer_plan_or_sandbox_server(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROLLOUT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    assert "swerl.rollout.episode" in modules
    assert [name for name in modules if name.startswith((*ABSENT, *UNUSED))] == []
