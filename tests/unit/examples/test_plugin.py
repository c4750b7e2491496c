"""A package outside swerl adds a dataset, an agent, an algorithm and a reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.examples.packages import ROOT, install

WRONG, RIGHT = "    return a - b\n", "    return a + b\n"
DIFF = f"""--- a/sums.py
+++ b/sums.py
@@ -1,2 +1,2 @@
 def add(a, b):
-{WRONG}+{RIGHT}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a folder of its own."""
    return install(ROOT / "examples" / "plugin", tmp_path_factory.mktemp("plugin"))


def swerl(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "swerl", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_its_dataset_agent_and_reward_make_an_episode(site: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "sums.py").write_text(f"def add(a, b):\n{WRONG}")
    row = {
        "name": "add",
        "repo": str(repo),
        "prompt": "add() in sums.py gives wrong sums.",
        "diff": DIFF,
        "check": "python3 -c 'import sums; assert sums.add(2, 3) == 5'",
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n" + json.dumps({**row, "name": "bad", "diff": ""}) + "\n")
    converted = swerl(
        site, tmp_path, "convert", "one-line-bugs", "--rows", str(rows), "-o", "tasks.jsonl"
    )
    assert converted.returncode == 0, converted.stderr
    assert "column diff is not a text" in (tmp_path / "tasks.rejects.jsonl").read_text()
    parts = ("--agent", "replacer", "--set", "rollout.reward=test-share", "--json")
    done = swerl(site, tmp_path, "rollout", "--tasks", "tasks.jsonl", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (json.loads(done.stdout)["verdict"], json.loads(done.stdout)["reward"]) == ("solved", 1)


def test_an_unknown_reward_is_found_before_a_run_starts(site: Path, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "twin_cpu.toml"
    for reward, code in (("test-share", 0), ("test-shares", 2)):
        done = swerl(
            site, tmp_path, "train", str(recipe), "--dry-run", "--set", f"rollout.reward={reward}"
        )
        assert done.returncode == code, done.stdout + done.stderr


TRAIN = """
import sys
from pathlib import Path
sys.path.insert(0, {examples!r})
import asyncio, rl_loop
from swerl.recipe.load import load
asyncio.run(rl_loop.main(load([Path("small.toml")]), Path("work")))
"""
SMALL = """
name = "small"
steps = 1
[tasks]
num_train = 2
[model]
warm_start_steps = 4
[harness]
type = "replacer"
[algorithm]
type = "rloo"
scale = 0.5
[rollout]
reward = "test-share"
groups_per_step = 1
episodes_per_group = 2
concurrency = 2
max_new_tokens = 24
max_turns = 2
[trainer]
ranks = 1
"""


@pytest.mark.integration
def test_its_algorithm_trains_in_the_ranks(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    (tmp_path / "small.toml").write_text(SMALL)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN.format(examples=str(ROOT / "examples"))],
        env={**os.environ, "PYTHONPATH": path, "SWERL_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "step 0: reward" in done.stdout
