"""How many Episodes a step begins, against sums by hand and against chance."""

from __future__ import annotations

import random
from math import ceil

import pytest

from swerl.plan.cost import attempts, estimate, from_recipe, group_factor
from swerl.recipe.schema import Recipe, RolloutSection


def section(**settings: object) -> RolloutSection:
    return RolloutSection.model_validate({"group_filter": "zero-variance"} | settings)


def test_without_a_filter_every_group_is_trained() -> None:
    assert group_factor(RolloutSection()) == 1


def test_one_group_is_begun_until_it_passes_or_rounds_are_over() -> None:
    rollout = section(groups_per_step=1, refill_rounds=2)
    assert group_factor(rollout, 0.5) == pytest.approx(1 + 0.5 + 0.25)


def test_oversampling_begins_more_at_once() -> None:
    rollout = section(groups_per_step=2, oversample=2, refill_rounds=0)
    assert group_factor(rollout, 0.5) == 2


def test_mean_is_that_of_many_steps() -> None:
    rollout = section(groups_per_step=8, oversample=1.5, refill_rounds=3)
    chance = random.Random(0)

    def step() -> int:
        missing, begun = 8, 0
        for _ in range(4):
            size = ceil(missing * 1.5)
            begun += size
            missing = max(missing - sum(chance.random() < 0.6 for _ in range(size)), 0)
        return begun

    mean = sum(step() for _ in range(20_000)) / 20_000
    assert 8 * group_factor(rollout, 0.6) == pytest.approx(mean, rel=0.01)


def test_lost_episodes_are_tried_again_as_often_as_allowed() -> None:
    assert attempts(RolloutSection(refills=0), 0.1) == 1
    assert attempts(RolloutSection(refills=2), 0.1) == pytest.approx(1.11)


def test_estimate_counts_what_is_left_out_and_tried_again() -> None:
    plain = Recipe.model_validate({"name": "r", "sandbox": {"type": "e2b"}})
    rollout = {"group_filter": "mixed-verdicts", "oversample": 2.0, "refill_rounds": 0}
    filtered = plain.model_copy(update={"rollout": RolloutSection.model_validate(rollout)})
    before, after = (
        estimate(from_recipe(recipe), ["eval_episodes=0"]) for recipe in (plain, filtered)
    )
    assert after.num_episodes == 2 * before.num_episodes
    assert after.cases[1].sandbox_dollars == pytest.approx(2 * before.cases[1].sandbox_dollars)
    again = estimate(from_recipe(plain), ["eval_episodes=0", "attempts=3"])
    assert again.num_sandboxes == 6 * before.num_episodes
