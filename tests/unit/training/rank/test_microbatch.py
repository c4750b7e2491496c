"""Rows over ranks and micro-batches: nothing lost, nothing twice, budgets kept."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swerl.core import experts
from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts
from swerl.plan.parameters import RowCost
from swerl.training import batch as batches
from swerl.training.rank.context import RowShare, whole_order
from swerl.training.rank.microbatch import WeightedSample, rank_micro_batches, to_tensors

MakeBatch = Callable[..., Batch]
CPU = torch.device("cpu")
COST = RowCost(per_token=1000.0, per_token_pair=1.0)


def split(batch: Batch, rank: int, num_ranks: int) -> list[list[WeightedSample]]:
    return rank_micro_batches(batch, rank=rank, num_ranks=num_ranks, budget=500, cost=COST)


def batch_of(fan_outs: list[int], rng: random.Random) -> Batch:
    """Return a Batch of one Episode a fan-out, with shares by their trained tokens."""
    samples = []
    for number, fan_out in enumerate(fan_outs):
        lengths = [rng.randint(2, 120) for _ in range(fan_out)]
        for length in lengths:
            share = (length - 1) / (sum(lengths) - fan_out)
            mask = (0,) + (1,) * (length - 1)
            ids, logprobs = tuple(range(length)), (0.0,) * length
            samples.append(Sample(f"episode-{number}", "t", ids, mask, logprobs, share=share))
    return Batch(0, tuple(samples), len(fan_outs))


@given(
    fan_outs=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    num_ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_every_episode_votes_once_however_its_samples_are_spread(
    fan_outs: list[int], num_ranks: int, seed: int
) -> None:
    batch = batch_of(fan_outs, random.Random(seed))
    parts = [split(batch, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(part) for part in parts}) == 1
    votes = dict.fromkeys((f"episode-{number}" for number in range(len(fan_outs))), 0.0)
    for row in (row for part in parts for rows in part for row in rows):
        votes[row.sample.episode] += row.weight
    assert list(votes.values()) == pytest.approx([1 / len(fan_outs)] * len(fan_outs))


def test_a_rank_without_rows_gets_one_that_trains_nothing(random_batch: MakeBatch) -> None:
    batch = random_batch(0, num_rows=2)
    (idle,) = next(
        part for part in (split(batch, rank, 3) for rank in range(3)) if not part[0][0].weight
    )
    assert [(row.weight, row.sample.num_trained_tokens) for row in idle] == [(0.0, 0)]
    micro = to_tensors(idle, all_tokens=False, device=CPU)
    assert micro.grid(torch.zeros(0)).shape == micro.mask_BT.shape == (1, 1)


def test_rows_of_a_micro_batch_are_sorted_longest_first(random_batch: MakeBatch) -> None:
    (rows,) = split(random_batch(0), 0, 1)
    lengths = [len(row.sample.ids) for row in rows]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("all_tokens", [False, True])
def test_packed_tensors_hold_each_token_at_its_place(
    random_batch: MakeBatch, all_tokens: bool
) -> None:
    batch = random_batch(1)
    weights = batches.weights(batch)
    rows = [
        WeightedSample(place, sample, weight)
        for place, (sample, weight) in enumerate(zip(batch.samples, weights, strict=True))
    ]
    micro = to_tensors(rows, all_tokens=all_tokens, device=CPU)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.sample.ids) - 1)
    wanted = [
        (number, t, starts[number] + t, row.sample.ids[t + 1])
        for number, row in enumerate(rows)
        for t in range(len(row.sample.ids) - 1)
        if all_tokens or row.sample.mask[t + 1]
    ]
    found = zip(
        micro.row_S.tolist(),
        micro.position_S.tolist(),
        micro.rows.selected_O.tolist(),
        micro.rows.labels_O.tolist(),
        strict=True,
    )
    assert list(found) == wanted
    assert micro.rows.ids_N.tolist() == [t for row in rows for t in row.sample.ids[:-1]]


def test_experts_are_placed_at_the_positions_that_they_were_chosen_for(
    tmp_path: Path, random_batch: MakeBatch
) -> None:
    first, second = random_batch(0).samples[2:4]
    pieces = (RoutedExperts(0, 3, 2, 1, bytes(range(250, 256))), RoutedExperts(2, 3, 2, 2, _IDS))
    rows = [WeightedSample(0, replace(first, routed=pieces), 0.5), WeightedSample(1, second, 0.5)]
    routed_NLK = to_tensors(rows, all_tokens=False, device=CPU).rows.routed_NLK
    assert routed_NLK is not None
    assert routed_NLK.shape == (len(first.ids) + len(second.ids) - 2, 3, 2)
    assert routed_NLK[0].tolist() == [[250, 251], [252, 253], [254, 255]]
    assert routed_NLK[2].tolist() == [[300, 301], [302, 303], [304, 305]]
    stored = tuple(experts.store(tmp_path / "experts.bin", pieces))
    rows[0] = WeightedSample(0, replace(first, routed=stored), 0.5)
    again_NLK = to_tensors(rows, all_tokens=False, device=CPU).rows.routed_NLK
    assert again_NLK is not None
    assert torch.equal(routed_NLK, again_NLK)
    recorded = (routed_NLK >= 0).all(dim=(1, 2)).nonzero().flatten()
    assert recorded.tolist() == [0, 2]
    assert to_tensors(rows[1:], all_tokens=False, device=CPU).rows.routed_NLK is None


_IDS = array("H", range(300, 306)).tobytes()


def test_context_ranks_share_every_selected_token(random_batch: MakeBatch) -> None:
    share = RowShare(context_ranks=2, tensor_ranks=2)
    (rows,) = split(random_batch(1), 0, 1)
    whole = to_tensors(rows, all_tokens=False, device=CPU)
    parts = [
        to_tensors(rows, all_tokens=False, device=CPU, share=replace(share, context_rank=rank))
        for rank in range(2)
    ]
    labels_S = torch.full_like(whole.rows.labels_O, -1)
    for part in parts:
        assert torch.equal(part.row_S, whole.row_S)
        assert part.rows.num_selected == len(labels_S)
        labels_S[part.rows.index_O] = part.rows.labels_O
        assert len(part.rows.ids_N) % 2 == 0
    assert torch.equal(labels_S, whole.rows.labels_O)
    ids_M = torch.cat([part.rows.ids_N for part in parts])[whole_order(parts[0].rows.lengths, 2)]
    starts = torch.tensor([0, *parts[0].rows.lengths[:-1]]).cumsum(0)
    for start, row in zip(starts.tolist(), rows, strict=True):
        count = len(row.sample.ids) - 1
        assert ids_M[start : start + count].tolist() == list(row.sample.ids[:-1])
