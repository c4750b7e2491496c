"""Dollars, efficiency and memory of a step, and the cap on what a run may spend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from swerl.core.errors import RecipeError, RunError, RunStoppedError
from swerl.core.events import Event, Notice, PhaseEnded, StepEnded
from swerl.plan.memory import GPUS
from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_of
from swerl.recipe.load import load
from swerl.runs.history import RunHistory
from swerl.training import efficiency
from swerl.training.efficiency import CostMeter

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen35b_8node.toml"
HOUR = 64 * 2.5
"""Dollars of an hour of the GPUs."""


class Run:
    """A cost meter with a clock set by hand."""

    def __init__(self, *settings: str, file: Path | None = None) -> None:
        self.recipe = load([RECIPE], settings)
        self.events: list[Event] = []
        self.now = 0.0
        emit, clock = self.events.append, lambda: self.now
        self.costs = CostMeter(self.recipe, emit, RunHistory({}), file=file, clock=clock)

    def step(self, **metrics: float) -> Mapping[str, float]:
        self.costs(StepEnded(0, metrics))
        last = self.events[-1] if isinstance(self.events[-1], StepEnded) else self.events[-2]
        assert isinstance(last, StepEnded)
        return last.metrics

    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def test_dollars_are_those_of_gpus_and_sandboxes() -> None:
    run = Run()
    run.now = 1800
    phases = {"boot": 10, "hide_future": 5, "agent": 900, "grade": 90, "test": 80}
    for phase, seconds in phases.items():
        run.costs(PhaseEnded("a", phase, seconds))
    metrics = run.step()
    assert metrics["sandbox_s"] == 1000
    assert metrics["dollars"] == pytest.approx(HOUR / 2 + 1000 * 0.000092)
    assert run.step()["sandbox_s"] == 0
    assert sum(isinstance(event, PhaseEnded) for event in run.events) == 5


def test_run_is_spent_at_its_cap_and_warns_once() -> None:
    run = Run("cost.max_dollars=150")
    run.now = 3300
    assert not run.costs.is_spent()
    run.now = 3600
    assert run.costs.is_spent()
    assert run.costs.is_spent()
    assert run.notices() == ["$160.00 are spent of cost.max_dollars = 150"]


async def test_the_cap_ends_a_step_and_a_crash_forgets_no_spending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficiency, "_WATCH_S", 0.01)
    run = Run("cost.max_dollars=150", file=tmp_path / "cost.json")
    run.now = 1800
    async with run.costs.watched():
        await asyncio.sleep(0.05)
    again = Run("cost.max_dollars=150", file=tmp_path / "cost.json")
    assert again.costs.dollars() == pytest.approx(HOUR / 2)
    with pytest.raises(RunStoppedError, match=r"cost\.max_dollars = 150 is spent"):
        async with asyncio.timeout(30), again.costs.watched():
            await asyncio.sleep(0.05)
            again.now = 1800
            await asyncio.sleep(60)
    with pytest.raises(RunError, match=r"has spent \$160\.00"):
        Run("cost.max_dollars=150", file=tmp_path / "cost.json")


async def test_the_cap_at_the_end_of_a_step_leaves_time_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficiency, "_WATCH_S", 0.01)
    run = Run("cost.max_dollars=150", file=tmp_path / "cost.json")
    async with run.costs.watched():
        run.now = 3600
        assert run.costs.ends_run()
        await asyncio.sleep(0.1)


def test_cap_without_a_price_is_refused() -> None:
    with pytest.raises(RecipeError, match="no price is set for mi355x_hour") as caught:
        Run("cost.max_dollars=150", "cluster.gpu=mi355x")
    setting = caught.value.hint.split()[1].replace("DOLLARS", "2")
    run = Run("cost.max_dollars=150", "cluster.gpu=mi355x", setting)
    run.now = 3600
    assert run.costs.dollars() == 64 * 2


def test_mfu_is_the_models_own_arithmetic_over_the_gpus_peak() -> None:
    run = Run()
    lengths = [30_000, 50_000]
    pairs = sum(length**2 for length in lengths)
    metrics = run.step(train_s=100, executed_tokens=sum(lengths), executed_token_pairs=pairs)
    work = sum(row_cost(shape_of(run.recipe.model)).of(length) for length in lengths)
    assert metrics["mfu"] == pytest.approx(work / (100 * 64 * GPUS["h100"].bf16_flops))


def test_measured_memory_is_compared_with_the_plan() -> None:
    run = Run()
    planned = run.step(peak_memory_gib=57.0)["planned_memory_gib"]
    # 72.1 GiB less 11.5 of contexts and 2.8 of gaps.
    assert planned == pytest.approx(57.8, abs=0.1)
    assert not run.notices()
    for measured in (planned * 1.2, planned * 1.2):
        run.step(peak_memory_gib=measured)
    assert run.notices() == ["memory: planned 57.7, measured 69.3 GiB (+20%); the plan is off"]
