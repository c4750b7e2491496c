"""Packs of rows: each row once, the budget kept, as many packs on every rank, work balanced."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerl.core.errors import TrainerError
from swerl.plan.parameters import RowCost
from swerl.training.rank.packing import Packs, pack

COST = RowCost(per_token=73_000.0, per_token_pair=1.0)
"""Length and its square weigh the same at 73,000 tokens, as in a 35B hybrid model."""


def packed(sizes: list[int], num_ranks: int, budget: int) -> Packs:
    costs = [COST.of(size) for size in sizes]
    return pack(sizes, costs, num_ranks=num_ranks, budget=budget)


def agent_rows(seed: int) -> list[int]:
    """Return lengths of 2,000 to 96,000 tokens: one long conversation and up to five shorter."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(64):
        medians = [49_000] + [20_000] * rng.randint(0, 5)
        drawn = [median * rng.lognormvariate(0, 0.6) for median in medians]
        lengths += [int(min(96_000, max(2_000, length))) for length in drawn]
    return lengths


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    num_ranks=st.integers(1, 6),
    budget=st.integers(100, 400),
)
def test_any_rows_are_packed_once_within_budget_and_evenly(
    sizes: list[int], num_ranks: int, budget: int
) -> None:
    found = packed(sizes, num_ranks, budget)
    assert len(found) == num_ranks
    assert {len(rank) for rank in found} == {len(found[0])}
    packs = [items for rank in found for items in rank]
    assert sorted(item for items in packs for item in items) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in items) <= budget for items in packs)
    if len(found[0]) > 1:
        full = [sum(sizes[item] for item in items) for items in packs]
        assert sum(full) > (len(found[0]) - 1) * num_ranks * budget / 2


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_agent_rows_fill_the_fewest_micro_batches_that_can_hold_them(
    seed: int, num_ranks: int
) -> None:
    sizes = agent_rows(seed)
    found = packed(sizes, num_ranks, 96_000)
    assert len(found[0]) == -(-sum(sizes) // (num_ranks * 96_000))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_get_nearly_the_same_work(seed: int, num_ranks: int) -> None:
    sizes = agent_rows(seed)
    found = packed(sizes, num_ranks, 96_000)
    work = [sum(COST.of(sizes[item]) for items in rank for item in items) for rank in found]
    assert max(work) <= 1.03 * sum(work) / num_ranks


def test_a_row_over_the_budget_is_refused_with_the_setting_that_would_hold_it() -> None:
    with pytest.raises(TrainerError, match="a row of 51 positions is over the budget of 50") as e:
        packed([20, 51], 2, 50)
    assert "tokens_per_micro_batch" in e.value.hint
    assert "51" in e.value.hint
