"""`swerl train` in every mode of its schedule, on real parts: killed, resumed, compared."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.test_train import RECIPE, Run, _until

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

SHAPED = """
[rollout.shaping]
malformed = 0.5
"""
"""Rewards that differ although so small a model solves nothing: without them no weight moves."""
ASYNC = """
[schedule]
mode = "async"
max_staleness = 2
[eval]
attempts = 2
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose runs share one warm start."""
    return tmp_path_factory.mktemp("schedules")


def run_of(home: Path, name: str, more: str = "", steps: int = 4) -> Run:
    run = Run(home)
    run.recipe = home / f"{name}.toml"
    recipe = RECIPE.replace('"small"', f'"{name}"').replace("steps = 6", f"steps = {steps}", 1)
    recipe = recipe.replace("num_heldout = 3", "num_heldout = 1")
    run.recipe.write_text(recipe.replace("num_unseen = 2", "num_unseen = 0") + more)
    run.root = home / "runs" / name
    return run


def entries(run: Run) -> list[dict[str, Any]]:
    lines = (run.root / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def metrics(run: Run) -> list[dict[str, float]]:
    events = map(json.loads, (run.root / "events.jsonl").read_text().splitlines())
    return [event["metrics"] for event in events if event["event"] == "StepEnded"]


@pytest.mark.slow
def test_an_async_run_that_is_killed_trains_every_task_once_and_within_the_bound(
    home: Path,
) -> None:
    run = run_of(home, "pool", ASYNC, steps=4)
    killed = run.start()
    _until(lambda: (run.root / "state.json").exists() and run.state()["step"] >= 1, killed)
    since = time.time()
    _until(lambda: run.has_trained(since), killed)
    before = {path: path.stat().st_mtime_ns for path in run.episodes()}
    committed = run.state()["versions"]
    killed.kill()
    killed.communicate(timeout=60)
    _until(lambda: not run.processes(), None)

    code, output = run.finish()
    assert code == 0, output
    state = run.state()
    assert (state["step"], state["cursor"]) == (4, {"next_place": 8, "under_way": []})
    trained = Counter((line["stage"], line["task"]) for line in _counted(run))
    assert sorted(stage for stage, _ in trained) == sorted(2 * [f"{n:05d}" for n in range(4)])
    assert set(trained.values()) == {1}
    for path in before:
        names = {
            turn["weight_version"]
            for turn in json.loads((path.parent / "trajectory.json").read_text())["turns"]
        }
        if json.loads(path.read_text())["verdict"] != "infra" and names <= set(committed):
            assert path.stat().st_mtime_ns == before[path]
    assert all(step["staleness_max"] <= 2 for step in metrics(run))
    found = json.loads((run.root / "evals" / "eval-heldout-00004.json").read_text())
    assert found["versions"] == ["000004"]
    assert found["k"] == 2


def _counted(run: Run) -> list[dict[str, Any]]:
    """Return the ledger without lines of steps that were done again."""
    later: dict[tuple[str, str], dict[str, Any]] = {}
    for line in entries(run):
        later[line["stage"], line["task"]] = line
    assert all(line["fate"] == "trained" for line in later.values())
    return list(later.values())


@pytest.mark.slow
def test_a_step_killed_while_it_trains_is_taken_again_bit_for_bit(home: Path) -> None:
    """Its Episodes are read back, so both runs train on the same tokens."""
    run = run_of(home, "whole", SHAPED, steps=2)
    code, output = run.finish()
    assert code == 0, output
    again = run_of(home, "whole", SHAPED, steps=2)
    again.root = home / "again" / "runs" / "whole"
    shutil.copytree(run.root, again.root)
    again.folder = home / "again"
    shutil.copytree(home / "cache", home / "again" / "cache")
    state = run.state() | {
        "step": 1,
        "finished": False,
        "versions": run.state()["versions"][:2],
        "evals_done": run.state()["evals_done"][:1],
    }
    (again.root / "state.json").write_text(json.dumps(state))
    shutil.rmtree(again.root / "checkpoints" / "00002")
    shutil.rmtree(again.root / "weights" / "000002")
    (again.root / "samples" / "00001.parquet").unlink()

    killed = again.start()
    _until(lambda: (again.root / "samples" / "00001.parquet").exists(), killed)
    killed.kill()
    killed.communicate(timeout=60)
    _until(lambda: not again.processes(), None)
    code, output = again.finish()
    assert code == 0, output
    second = run.root / "weights" / "000002"
    assert _tensors(again.root / "weights" / "000002") == _tensors(second)
    assert _tensors(run.root / "weights" / "000001") != _tensors(second)


def _tensors(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.slow
def test_one_step_off_trains_tokens_that_are_one_version_old(home: Path) -> None:
    run = run_of(home, "ahead", '[schedule]\nmode = "one-step-off"\n', steps=2)
    code, output = run.finish()
    assert code == 0, output
    assert [step["staleness"] for step in metrics(run)] == [0.0, 1.0]
    assert all(line["versions"] == ["000000"] for line in entries(run))
