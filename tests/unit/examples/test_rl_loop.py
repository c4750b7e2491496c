"""The example loop trains on the public API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "rl_loop.py"
SMALL = """
name = "small"
[tasks]
num_train = 4
[model]
warm_start_steps = 4
[rollout]
groups_per_step = 2
episodes_per_group = 2
concurrency = 2
max_new_tokens = 32
max_turns = 2
[trainer]
ranks = 1
"""


def test_the_example_loop_takes_two_steps(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(SMALL)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2", "--recipe", str(recipe)],
        env={**os.environ, "SWERL_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step (\d): reward \S+ 4 attempts, .* weights (\S+)$", done.stdout, re.M)
    assert [step for step, _ in steps] == ["0", "1"]
    assert len({version for _, version in steps}) == 2


def test_the_example_loop_stays_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
