"""`swerl train` whole, on real parts: interrupted, killed, resumed, and every token accounted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

RECIPE = Path(__file__).with_name("small.toml").read_text()
MINE = """
from swerl.core.learning import LossResult

def brevity(attempt):
    return -attempt.trajectory.num_sampled_tokens

class Mine:
    needs_reference = needs_context = False

    def advantages(self, groups):
        return [[episode.reward for episode in group.episodes] for group in groups]

    def loss(self, inputs):
        gain = (inputs.logp_BT.exp() * inputs.mask_BT).sum() * 0
        advantage = (inputs.weight_B * inputs.advantage_B).sum()
        return LossResult(gain + 7 * inputs.weight_B.sum(), {"advantage": float(advantage)})

def build():
    return Mine()
"""


class Run:
    """One run folder and the command that works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "small.toml"
        self.recipe.write_text(RECIPE)
        self.root = folder / "runs" / "small"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command in a session of its own."""
        command = [sys.executable, "-m", "swerl", "train", str(self.recipe), *arguments]
        return subprocess.Popen(
            [*command, "--runs", str(self.folder / "runs")],
            env={**os.environ, "SWERL_CACHE": str(self.folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, *arguments: str) -> tuple[int, str]:
        """Run the command to its end."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def again(self, reward: str, *settings: str) -> dict[str, Any]:
        """Return the figures of `swerl reward` with these keys of the algorithm."""
        command = [sys.executable, "-m", "swerl", "reward", reward, str(self.root), "--json"]
        command += [word for setting in settings for word in ("--set", setting)]
        output = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert output.returncode == 0, output.stderr
        figures: dict[str, Any] = json.loads(output.stdout)["loss"]
        return figures

    def episodes(self) -> list[Path]:
        """Return the finished Episodes of all stages."""
        return sorted((self.root / "episodes").glob("*/*/episode.json"))

    def has_trained(self, since: float) -> bool:
        """Return whether a training Episode was finished after this time."""
        stages = [path for path in self.episodes() if path.parts[-3].isdigit()]
        return any(path.stat().st_mtime > since for path in stages)

    def state(self) -> dict[str, Any]:
        """Return the committed state."""
        state: dict[str, Any] = json.loads((self.root / "state.json").read_text())
        return state

    def processes(self, module: str = "") -> list[int]:
        """Return the processes of this run, or those that run one of its modules."""
        return [
            pid for pid, line in _command_lines() if str(self.folder) in line and module in line
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("train"))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("swerl.engines._torch_server", "episodes were lost: Engine"),
        ("swerl.training.rank.worker", "trainer"),
    ],
)
def test_a_part_that_dies_stops_the_run_with_one_clear_error(
    run: Run, module: str, error: str
) -> None:
    began = time.time()
    started = run.start()
    _until(lambda: run.has_trained(began), started)
    for pid in run.processes(module):
        os.kill(pid, signal.SIGKILL)
    output, _ = started.communicate(timeout=120)
    assert started.returncode == 1, output
    assert "error:" in output and error in output and "hint:" in output
    assert "killed by SIGKILL" in output
    assert "Traceback" not in output
    assert not run.processes()


def test_a_run_survives_ctrl_c_and_kill_and_trains_every_sampled_token(run: Run) -> None:
    began = time.time()
    interrupted = run.start()
    _until(lambda: run.has_trained(began), interrupted)
    interrupted.send_signal(signal.SIGINT)
    output, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130, output
    assert "run the same command again" in output

    began = time.time()
    killed = run.start()
    _until(lambda: run.has_trained(began), killed)
    before = {path: path.stat().st_mtime_ns for path in run.episodes()}
    killed.kill()
    killed.communicate(timeout=60)
    _until(lambda: not run.processes(), None)

    code, output = run.finish()
    assert code == 0, output
    assert "reward by step" in output
    state = run.state()
    assert (state["step"], state["finished"]) == (6, True)
    assert state["evals_done"] == [
        f"eval-{split}-{step:05d}" for step in (0, 6) for split in ("heldout", "unseen")
    ]
    assert len(state["versions"]) == 7
    learned = {path for path in before if json.loads(path.read_text())["verdict"] != "infra"}
    assert learned and all(path.stat().st_mtime_ns == before[path] for path in learned)
    for step in range(6):
        _assert_trained_as_sampled(run.root, step)


@pytest.mark.integration
def test_a_recorded_step_taken_again_has_its_figures_and_another_loss_has_others(
    run: Run, tmp_path: Path
) -> None:
    assert run.finish()[0] == 0  # at once, if an earlier test has finished it
    state = run.state()
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    same = run.again("solved", "algorithm.type=gspo")
    assert same["step"] == 5
    for name, value in same["retaken"].items():
        assert value == pytest.approx(same["recorded"][name], rel=1e-4, abs=1e-7), name
    other = run.again(f"{mine}:brevity", f"algorithm.type={mine}")
    assert other["retaken"]["loss"] == pytest.approx(7.0)
    assert other["retaken"]["advantage"] != 0
    assert run.state() == state and not run.processes()


@pytest.mark.integration
def test_sigterm_commits_the_step_under_way(tmp_path: Path) -> None:
    run = Run(tmp_path)
    stopped = run.start("--set", "eval.every=0", "--set", "budgets.grace_s=300")
    _until(lambda: run.has_trained(0.0), stopped)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=300)
    assert stopped.returncode == 143, output
    assert run.state()["step"] == 1
    assert "stopped after step 1 of 6" in output


def test_a_finished_run_says_so_at_once_and_another_recipe_is_refused(run: Run) -> None:
    if not (run.root / "state.json").exists():
        pytest.skip("needs the run of the test before")
    code, output = run.finish()
    assert code == 0
    assert "reward by step" in output
    code, output = run.finish("--set", "seed=7")
    assert code == 2
    assert "seed (0 -> 7)" in output
    assert "--set name=" in output


def _assert_trained_as_sampled(root: Path, step: int) -> None:
    """Compare the Batch of a step, token by token, with what its Episodes sampled."""
    from swerl.training import batch

    trained = batch.read(root / "samples" / f"{step:05d}.parquet")
    sampled: list[tuple[int, float]] = []
    for path in (root / "episodes" / f"{step:05d}").glob("*/trajectory.json"):
        for turn in json.loads(path.read_text())["turns"]:
            assert int(turn["weight_version"]) == step
            sampled += zip(turn["output_ids"], turn["logprobs"], strict=True)
    rows = [
        (token, logprob)
        for sample in trained.samples
        for token, logprob, is_trained in zip(sample.ids, sample.logprobs, sample.mask, strict=True)
        if is_trained
    ]
    assert len(rows) == len(sampled) > 0
    for (token, logprob), (want, exact) in zip(sorted(rows), sorted(sampled), strict=True):
        assert (token, logprob) == (want, pytest.approx(exact, abs=1e-6))


def _until(reached: Callable[[], bool], process: subprocess.Popen[str] | None) -> None:
    deadline = time.monotonic() + 600
    while not reached():
        if process is not None and process.poll() is not None:
            pytest.fail(f"the run ended early: {process.communicate()[0]}")
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            yield int(entry.parent.name), line
        except OSError:
            continue


def test_every_metric_of_a_run_is_explained(run: Run) -> None:
    if not (run.root / "state.json").exists():
        pytest.skip("needs the run of the tests before")
    names = metric_names(run.root)
    assert {"sandbox_s", "dollars", "row_tokens", "mismatch"} <= names
    assert unexplained(names) == []


def test_every_file_of_a_run_folder_is_in_the_reference(run: Run) -> None:
    if not (run.root / "state.json").exists():
        pytest.skip("needs the run of the tests before")
    page = (Path(__file__).parents[1] / "docs" / "reference" / "run-folder.md").read_text()
    folder = next((run.root / "episodes").glob("*/*"))
    names = [*(path.name for path in run.root.iterdir()), *(path.name for path in folder.iterdir())]
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


def metric_names(root: Path) -> set[str]:
    """Return the names of all metrics of a run's steps, those of tenths as one."""
    lines = (root / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "StepEnded"]
    return {re.sub(r"_d\d+$", "_d1", name) for event in steps for name in event["metrics"]}


def unexplained(names: set[str]) -> list[str]:
    """Return the metrics that docs/reference/metrics.md does not name."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "metrics.md").read_text()
    return [name for name in sorted(names) if f"`{name}`" not in page]
