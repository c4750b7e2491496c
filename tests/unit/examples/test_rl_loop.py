"""The example loop trains on the public API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


WITHOUT = """
import runpy, sys
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *more: None if name == "safetensors" else found(name, *more)
sys.modules["safetensors"] = None
sys.argv = [{example!r}]
runpy.run_path({example!r}, run_name="__main__")
"""


def test_without_the_trainer_it_names_the_package_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(example=str(EXAMPLE))],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "[twin]" in done.stderr and "safetensors" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
def test_the_example_loop_takes_two_steps(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    recipe = tmp_path / "small.toml"
    recipe.write_text(SMALL)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2", "--recipe", str(recipe)],
        env={**os.environ, "SWERL_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("making tasks and a model")
    steps = re.findall(r"^step (\d): reward \S+ 4 attempts, .* weights (\S+)$", done.stdout, re.M)
    assert [step for step, _ in steps] == ["0", "1"]
    assert len({version for _, version in steps}) == 2


def test_the_example_loop_stays_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
