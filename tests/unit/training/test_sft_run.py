"""A run on recorded Episodes whole: from a real run's folder to new weights, killed and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

from swerl.core.sample import to_samples
from swerl.rollout import record
from swerl.runs.evaluation import compare, find
from swerl.runs.tables import read_samples
from swerl.runs.why import diagnose

pytestmark = pytest.mark.integration

SAMPLED = """
name = "base"
steps = 1
tasks = {num_train = 4, num_heldout = 0, num_unseen = 0}
model.warm_start_steps = 12
rollout = {groups_per_step = 3, episodes_per_group = 3, concurrency = 2, max_new_tokens = 32}
"""
RECORDED = """
name = "sft"
steps = 12
model.path = "runs/base/initial_model"
algorithm.type = "sft"
trainer = {lr = 3e-3, warmup_steps = 1}
[sft]
sources = ["runs/base"]
verdicts = ["solved", "unsolved", "timeout"]
episodes_per_step = 3
"""


def _train(folder: Path, recipe: str, *settings: str) -> subprocess.Popen[str]:
    path = folder / "recipe.toml"
    path.write_text(recipe)
    given = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "swerl", "train", str(path), *given]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "SWERL_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run `base` has sampled Episodes, and whose run `sft` has trained on them."""
    folder = tmp_path_factory.mktemp("sft")
    _finish(_train(folder, SAMPLED))
    assert "loss by step" in _finish(_train(folder, RECORDED))
    return folder


def _kept(run: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (run / "kept.jsonl").read_text().splitlines()]


def _metrics(run: Path, name: str) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [each for each in events if each.get("event", each.get("type")) == "StepEnded"]
    return [each["metrics"][name] for each in steps]


def test_the_loss_falls_and_every_sampled_token_is_trained_as_sampled(folder: Path) -> None:
    run, kept = folder / "runs" / "sft", _kept(folder / "runs" / "sft")
    losses = _metrics(run, "nll")
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    expected = {
        each["id"]: [
            (row.ids, row.mask)
            for row in to_samples(record.read_trajectory(Path(each["path"])), episode="", task="")
        ]
        for each in kept
    }
    num_epoch = len(kept) // 3
    trained: dict[str, list[object]] = {}
    for step in range(num_epoch):
        for row in read_samples(run / "samples" / f"{step:05d}.parquet"):
            trained.setdefault(row.episode, []).append((row.ids, row.mask))
    assert len(trained) == 3 * num_epoch
    assert all(expected[name] == rows for name, rows in trained.items())
    assert _metrics(run, "trained_tokens") == _metrics(run, "sampled_tokens")


def test_neither_an_engine_nor_a_sandbox_starts(folder: Path) -> None:
    run = folder / "runs" / "sft"
    assert [path.name for path in (run / "logs").rglob("*.log")] == ["trainer-rank0.log"]
    assert not list((run / "episodes").iterdir())
    assert [path.name for path in (run / "weights").iterdir()] == ["000012"]


def test_no_fault_of_new_episodes_is_seen_in_recorded_ones(folder: Path) -> None:
    """All solved, and a distance to the policy that sampled: both are as they should be."""
    found = diagnose(folder / "runs" / "sft")
    assert not found.findings
    assert any("recorded" in each for each in found.problems)


def test_a_killed_run_resumes_to_the_same_bytes(folder: Path) -> None:
    settings = ("name=killed", "steps=40")
    killed = _train(folder, RECORDED, *settings)
    state = folder / "runs" / "killed" / "state.json"
    while not (state.exists() and json.loads(state.read_text())["step"] >= 2):
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    killed.kill()
    killed.communicate(timeout=60)
    assert json.loads(state.read_text())["step"] < 40
    _finish(_train(folder, RECORDED, *settings))
    _finish(_train(folder, RECORDED, "name=straight", "steps=40"))
    files = [
        folder / "runs" / name / "weights" / "000040" / "model.safetensors"
        for name in ("killed", "straight")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_held_out_tasks_are_evaluated_before_and_after(folder: Path) -> None:
    settings = ("name=judged", "sft.evaluate=true", "tasks.num_heldout=2", "tasks.num_unseen=0")
    output = _finish(_train(folder, RECORDED, *settings, "steps=2"))
    run = folder / "runs" / "judged"
    evals = sorted((run / "evals").glob("*.json"))
    assert [path.stem for path in evals] == ["eval-heldout-00000", "eval-heldout-00002"]
    versions = [json.loads(path.read_text())["versions"] for path in evals]
    assert versions == [["000000"], ["000002"]]
    assert compare(find("judged@0", run.parent), find("judged@2", run.parent))["num_tasks"] == 2
    for path in evals:
        assert path.with_suffix(".parquet").exists()
        assert (run / "swebench" / path.stem / f"judged-{path.stem}.attempt-0.json").exists()
    assert "eval heldout" in output


def test_sources_without_a_kept_episode_end_in_two_lines(folder: Path) -> None:
    process = _train(folder, RECORDED, "name=none", 'sft.verdicts=["cheat"]')
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "sft keeps no Episode" in output and "9 unsolved" in output
    assert "hint:" in output and "Traceback" not in output
