"""`swerl train` with several agents, on real parts: killed, resumed, evaluated, exact."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

from swerl.recipe.load import load
from swerl.rollout import wiring
from swerl.rollout.parts import Parts
from swerl.runs import history
from swerl.training import batch
from tests.test_train import RECIPE, Run, _assert_trained_as_sampled, _until

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

REPLACER = Path(__file__).parents[2] / "examples" / "plugin" / "swerl_example" / "replacer.py"
STEPS = 4
AGENTS = f"""
[[harness]]
type = "builtin"

[[harness]]
type = "builtin"
name = "quick"
tool_timeout_s = 30
weight = 2

[[harness]]
type = "{REPLACER}"
held_out = true
"""
NAMES = ("builtin", "quick", "replacer")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was killed in mid-step and resumed."""
    run = Run(tmp_path_factory.mktemp("agents"))
    recipe = RECIPE.replace("steps = 6", f"steps = {STEPS}", 1)
    recipe = recipe.replace("num_unseen = 2", "num_unseen = 0").replace("= 3\n", "= 1\n", 1)
    run.recipe.write_text(recipe + AGENTS)
    began = time.time()
    killed = run.start()
    _until(lambda: run.has_trained(began), killed)
    before = {path: path.read_text() for path in run.episodes()}
    killed.kill()
    killed.communicate(timeout=60)
    _until(lambda: not run.processes(), None)
    code, output = run.finish()
    assert code == 0, output
    kept = {path: text for path, text in before.items() if '"verdict":"infra"' not in text}
    assert kept and all(path.read_text() == text for path, text in kept.items())
    return run


def drawn(run: Run) -> Parts:
    """Return parts that can only draw agents."""
    recipe = load([run.recipe])
    absent: object = None
    return wiring.parts_of(recipe, absent, lambda _: None)  # type: ignore[arg-type]


def test_a_group_has_the_agent_that_its_name_draws_also_after_a_kill(run: Run) -> None:
    parts, found = drawn(run), defaultdict(set)
    for path in run.episodes():
        summary = json.loads(path.read_text())
        found[path.parts[-3], summary["task_id"]].add(summary["agent"])
    trained = {name: agents for name, agents in found.items() if name[0].isdecimal()}
    assert trained == {
        (stage, task): {parts.drawn(f"{stage}/{task}").agent} for stage, task in trained
    }
    assert set().union(*trained.values()) == set(NAMES[:2])


def test_every_sampled_token_is_trained_once_and_no_advantage_mixes_agents(run: Run) -> None:
    for step in range(STEPS):
        _assert_trained_as_sampled(run.root, step)
        rows = batch.read(run.root / "samples" / f"{step:05d}.parquet").samples
        sums: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for row in rows:
            written = json.loads((run.root / "episodes" / row.episode / "episode.json").read_text())
            assert row.agent == written["agent"]
            sums[row.task, row.agent][row.episode] = row.advantage
        assert all(sum(each.values()) == pytest.approx(0, abs=1e-9) for each in sums.values())


def test_every_agent_is_evaluated_and_its_solve_rates_are_kept(run: Run) -> None:
    assert run.state()["evals_done"] == [
        f"eval-heldout-{name}-{step:05d}" for step in (0, STEPS) for name in NAMES
    ]
    events = map(json.loads, (run.root / "events.jsonl").read_text().splitlines())
    metrics = [event["metrics"] for event in events if event["event"] == "StepEnded"]
    names = {name for each in metrics for name in each}
    assert {
        f"{kind}/{name}" for kind in ("groups", "solve_rate", "reward") for name in NAMES[:2]
    } < names
    assert not any(name.endswith("/replacer") for name in names)
    columns = history.read(run.root / "events.jsonl").by_agent()
    assert {name: set(rates) for name, rates in columns.items()} == {
        "train": set(NAMES[:2]),
        "heldout": set(NAMES),
    }
