"""The arithmetic of an estimate; every assumption is visible and can be changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import InputError, UnknownNameError
from swerl.plan.cost import Assumption, attempts, estimate, from_recipe, group_factor
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe, RolloutSection

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen35b_8node.toml"


def example() -> tuple[Assumption, ...]:
    return from_recipe(load([RECIPE]))


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"name": "r", **sections})


@pytest.mark.parametrize(
    ("case", "seconds", "episode_dollars", "run_dollars"),
    [(0, 520, 0.05, 300), (1, 1140, 0.11, 700), (2, 2400, 0.22, 1400)],
)
def test_example_reproduces_the_published_sandbox_bill(
    case: int, seconds: float, episode_dollars: float, run_dollars: float
) -> None:
    result = estimate(example())
    found = result.cases[case]
    assert result.num_episodes == 6400
    assert result.num_sandboxes == round(12800 * 1.0204)
    assert found.episode_sandbox_seconds == seconds
    assert found.episode_sandbox_dollars == pytest.approx(episode_dollars, abs=0.0055)
    assert found.sandbox_dollars == pytest.approx(run_dollars, rel=0.05)


def test_example_reproduces_the_published_gpu_bill() -> None:
    low, _, high = estimate(example()).cases
    assert (round(low.hours), round(high.hours)) == (33, 50)
    assert (round(low.gpu_dollars), round(high.gpu_dollars)) == (5333, 8000)
    assert 5000 < low.total_dollars < high.total_dollars < 10000


def test_every_assumption_can_be_overridden_and_changes_or_keeps_the_result() -> None:
    for row in example():
        changed = estimate(example(), [f"{row.key}={row.value * 2 + 1}"])
        found = {new.key: new for new in changed.assumptions}[row.key]
        assert (found.value, found.source) == (row.value * 2 + 1, "--assume")
        before = estimate(example())
        assert (changed.cases, changed.num_sandboxes) != (before.cases, before.num_sandboxes)
    together = estimate(example(), ["sandbox_seconds=100"])
    assert [case.episode_sandbox_seconds for case in together.cases] == [100, 100, 100]


@pytest.mark.parametrize("setting", ["vcpus", "vcpus=", "vcpus=two", "vcpus=-1", "vcpus=nan"])
def test_setting_that_is_no_number_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match="is not key=number"):
        estimate(example(), [setting])


def test_unknown_assumption_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        estimate(example(), ["vcpu=2"])
    assert "vcpus" in caught.value.hint


def test_sandbox_seconds_follow_the_agent_budget() -> None:
    rows = {row.key: row for row in from_recipe(recipe(budgets={"agent_s": 900}))}
    assert rows["sandbox_seconds.high"].value == 1200
    assert "budgets.agent_s = 900" in rows["sandbox_seconds.high"].source


def test_evaluations_of_generated_tasks_are_counted() -> None:
    rows = {row.key: row for row in from_recipe(recipe(steps=45, eval={"every": 15}))}
    assert rows["eval_episodes"].value == 4 * 300
    agents = [{"type": "builtin"}, {"type": "pi", "held_out": True}]
    mixed = recipe(steps=45, eval={"every": 15, "attempts": 3}, harness=agents)
    rows = {row.key: row for row in from_recipe(mixed)}
    assert rows["eval_episodes"].value == 4 * 300 * 3 * 2
    assert "3 attempts each, by 2 agents" in rows["eval_episodes"].source


def test_a_gpu_without_a_price_is_an_error_with_a_remedy() -> None:
    assumed = from_recipe(recipe(cluster={"gpus_per_node": 8, "gpu": "h10"}))
    with pytest.raises(InputError, match="h10_hour") as caught:
        estimate(assumed)
    assert "--assume gpu_hour=" in caught.value.hint
    assert estimate(assumed, ["gpu_hour=1"]).cases[0].gpu_dollars > 0


def test_command_prints_every_assumption_and_case() -> None:
    shown = (
        CliRunner()
        .invoke(typer_app, ["cost", "estimate", str(RECIPE)], catch_exceptions=False)
        .output
    )
    assert all(row.key in shown for row in example())
    assert "minutes a step" in shown and "x the rollouts an hour" in shown
    assert all(text in shown for text in ("$0.048", "$0.105", "$0.221", "$8,000"))


def test_command_prints_json() -> None:
    arguments = ["estimate", str(RECIPE), "--json", "--set", "steps=7", "--assume", "gpus=0"]
    answer = json.loads(
        CliRunner().invoke(typer_app, ["cost", *arguments], catch_exceptions=False).output
    )
    assert [case["gpu_dollars"] for case in answer["cases"]] == [0, 0, 0]
    assert answer["cases"][0]["total_dollars"] == pytest.approx(306.176 * 1.0204 * 0.07)
    assert {row["key"]: row["value"] for row in answer["assumptions"]}["steps"] == 7


def test_one_group_is_begun_until_it_passes_or_rounds_are_over() -> None:
    rollout = RolloutSection(group_filter="zero-variance", groups_per_step=1, refill_rounds=2)
    assert group_factor(rollout) == pytest.approx(1 + 0.4 + 0.16)


def test_lost_episodes_are_tried_again_as_often_as_allowed() -> None:
    assert attempts(0.0) == 1
    assert attempts(0.1) == pytest.approx(1.11)


def test_an_estimate_counts_rejected_and_retried_episodes() -> None:
    plain = Recipe.model_validate({"name": "r", "sandbox": {"type": "e2b"}})
    rollout = {"group_filter": "mixed-verdicts", "refill_rounds": 1}
    filtered = plain.model_copy(update={"rollout": RolloutSection.model_validate(rollout)})
    before, after = (
        estimate(from_recipe(recipe), ["eval_episodes=0"]) for recipe in (plain, filtered)
    )
    assert after.num_episodes == pytest.approx(1.4 * before.num_episodes)
    assert after.cases[1].sandbox_dollars == pytest.approx(1.4 * before.cases[1].sandbox_dollars)
    again = estimate(from_recipe(plain), ["eval_episodes=0", "attempts=3"])
    assert again.num_sandboxes == 6 * before.num_episodes
