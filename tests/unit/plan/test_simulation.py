"""The simulated speed of a run: limits that sums by hand give, and the right directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swerl.plan.cost import Assumption
from swerl.plan.layout import layout
from swerl.plan.memory import plan_memory
from swerl.plan.shape import shape_of
from swerl.plan.simulation import Simulation, assumptions, simulate
from swerl.recipe.load import load

RECIPES = Path(__file__).parents[3] / "recipes"


def simulated(name: str, *settings: str, **values: float) -> Simulation:
    """Simulate a recipe, with other values of some assumptions."""
    recipe = load([RECIPES / f"{name}.toml"], settings)
    shape = shape_of(recipe.model)
    sizes = layout(recipe, shape)
    rows: list[Assumption] = [
        replace(row, value=values.get(row.key, row.value)) for row in assumptions(recipe, shape)
    ]
    return simulate(recipe, shape, sizes, plan_memory(recipe, shape, sizes).cache, rows=rows)


INSTANT = {"tool_s": 0.0, "grading_s": 0.0, "boot_s": 0.0}
"""Nothing but the engines takes time."""


def test_a_step_is_the_sum_of_its_parts() -> None:
    run = simulated("qwen35b_8node")
    assert sum(run.waits.values()) == pytest.approx(1)
    # 34.7B parameters at 10 GB/s and 8 GPUs an engine; 3 s and 5 s of fixed work.
    update_s = run.waits["weight update"] * run.step_s
    assert update_s == pytest.approx(2 * 34.66e9 / 8 / 10e9 + 3, rel=0.01)
    assert run.waits["the step's own work"] * run.step_s == pytest.approx(5)
    assert run.step_s > run.rollout_s + run.train_s


def test_one_reply_at_a_time_reads_all_weights_a_token() -> None:
    settings = ("rollout.concurrency=1", "rollout.groups_per_step=1")
    run = simulated("qwen06b_1gpu", *settings, **INSTANT, layer_s=0, prompt_mfu=1)
    replies_s = run.waits["replies"] * run.step_s
    # The slowest of eight Episodes; each token reads 1.2 GB at 2 TB/s.
    tokens = replies_s / (2 * 0.596e9 / (0.6 * 3.35e12))
    assert 200 < tokens < 4000


def test_sandboxes_are_waited_for_if_there_are_few() -> None:
    one, all_ = (
        simulated("qwen06b_1gpu", f"rollout.concurrency={slots}", layer_s=0) for slots in (1, 64)
    )
    assert one.waits["a free slot"] > 0.7
    assert all_.waits.get("a free slot", 0.0) < 0.1
    assert one.rollout_s > 10 * all_.rollout_s


def test_a_short_budget_stops_agents_and_their_rollout() -> None:
    run = simulated("qwen35b_8node", "budgets.agent_s=60", "budgets.tool_s=50", tool_s=20)
    assert run.timed_out > 0.9
    assert run.rollout_s < 60 + 2400


def test_replaced_groups_lengthen_a_synchronous_step() -> None:
    every = simulated("qwen35b_8node")
    some = simulated("qwen35b_8node", "rollout.group_filter=mixed-verdicts")
    assert some.waits["replacements of groups"] > 0.3
    assert some.step_s > 1.5 * every.step_s


@pytest.mark.parametrize(("train_mfu", "reason"), [(0.05, "tools"), (0.002, "training")])
def test_an_asynchronous_step_waits_for_the_slower_side(train_mfu: float, reason: str) -> None:
    run = simulated("qwen35b_8node_async", train_mfu=train_mfu)
    assert next(iter(run.waits)) == reason
    assert run.step_s == pytest.approx(max(run.rollout_s, run.train_s + 5), rel=0.05)


def test_staleness_bounds_an_asynchronous_step() -> None:
    loose, tight = (simulated("qwen35b_8node_async", f"schedule.max_staleness={n}") for n in (8, 1))
    assert tight.step_s > 1.5 * loose.step_s
