"""Positions over context ranks: each held once, evenly, and found again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swerl.training.rank.context import RowShare, held_order, take, whole_order

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), tensor=st.integers(1, 4))
def test_rows_are_padded_to_even_parts_and_no_further(
    lengths: list[int], ranks: int, tensor: int
) -> None:
    padded = RowShare(ranks, 0, tensor).pad(lengths)
    unit = 2 * ranks if ranks > 1 else 1
    assert all(length <= room for length, room in zip(lengths, padded, strict=True))
    assert all(room % unit == 0 for room in padded)
    assert sum(padded) % (ranks * tensor) == 0
    assert all(room - length < unit for length, room in zip(lengths[:-1], padded, strict=False))
    assert padded[-1] - lengths[-1] < unit + 2 * ranks * tensor


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_the_ranks_parts_make_up_the_whole(lengths: list[int], ranks: int) -> None:
    padded = RowShare(ranks).pad(lengths)
    parts = [RowShare(ranks, rank).positions(padded) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    whole = torch.cat(parts)[whole_order(padded, ranks)]
    assert whole.tolist() == list(range(sum(padded)))


def test_rows_in_another_order_have_the_gradients_of_plain_indexing() -> None:
    order, back = whole_order((8, 16), 2), held_order((8, 16), 2)
    x, upper = torch.randn(24, 3, requires_grad=True), torch.randn(24, 3)
    (wanted,) = torch.autograd.grad(x[order], x, upper)
    found = take(x, order, back)
    assert torch.equal(found, x[order])
    assert torch.equal(torch.autograd.grad(found, x, upper)[0], wanted)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_attention_costs_every_rank_the_same(ranks: int) -> None:
    lengths = RowShare(ranks).pad([320, 96])
    starts = torch.tensor([0] * lengths[0] + [lengths[0]] * lengths[1])
    seen = torch.arange(sum(lengths)) - starts + 1
    costs = {int(seen[RowShare(ranks, rank).positions(lengths)].sum()) for rank in range(ranks)}
    assert len(costs) == 1
