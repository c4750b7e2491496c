"""`swerl train` in every mode of its schedule, on real parts: killed, resumed, compared."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swerl.rollout import record
from swerl.training import batch
from tests.test_train import RECIPE, Run, _until, metric_names, unexplained

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
    trained = Counter((line["stage"], line["task"]) for line in entries(run))
    assert {line["fate"] for line in entries(run)} == {"trained"}
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
    assert unexplained(metric_names(run.root)) == []
    _assert_every_token_is_trained_once(run)
    found = json.loads((run.root / "evals" / "eval-heldout-00004.json").read_text())
    assert found["versions"] == ["000004"]
    assert found["k"] == 2


def _assert_every_token_is_trained_once(run: Run) -> None:
    """Compare all Batches of a run with what all its learnable Episodes sampled."""
    from numpy import float32

    trained: Counter[tuple[str, int, float]] = Counter()
    steps: dict[str, set[int]] = {}
    for path in (run.root / "samples").glob("*.parquet"):
        for sample in batch.read(path).samples:
            steps.setdefault(sample.episode, set()).add(int(path.stem))
            rows = zip(sample.ids, sample.logprobs, sample.mask, strict=True)
            trained.update((sample.episode, i, float32(p)) for i, p, is_own in rows if is_own)
    sampled: Counter[tuple[str, int, float]] = Counter()
    for path in (run.root / "episodes").glob("[0-9]*/*"):
        if not record.is_finished(path) or not (found := record.read(path)).learnable:
            continue
        for turn in found.trajectory.turns:
            ids = zip(turn.output_ids, turn.logprobs, strict=True)
            sampled.update((found.id, token, float32(logprob)) for token, logprob in ids)
    assert sampled and sum(trained.values()) == sum(sampled.values())
    assert trained == sampled
    assert all(len(found) == 1 for found in steps.values())
    assert sum(step["trained_tokens"] for step in _last_of_each(run)) == sum(sampled.values())


def _last_of_each(run: Run) -> list[dict[str, float]]:
    """Return the metrics of each step as it was taken last."""
    events = map(json.loads, (run.root / "events.jsonl").read_text().splitlines())
    ended = [event for event in events if event["event"] == "StepEnded"]
    return list({event["step"]: event["metrics"] for event in ended}.values())


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
