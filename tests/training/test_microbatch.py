"""Rows over ranks and micro-batches: nothing lost, nothing twice, budgets kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swerl.learning import Batch
from swerl.training import batch as batches
from swerl.training.microbatch import Row, cut, rank_rows, to_tensors

MakeBatch = Callable[..., Batch]
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_each_row_is_trained_by_exactly_one_rank(random_batch: MakeBatch, num_ranks: int) -> None:
    batch = random_batch(0, num_rows=40)
    parts = [rank_rows(batch, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    rows = [row for part in parts for row in part]
    assert sorted(row.sample.ids for row in rows) == sorted(s.ids for s in batch.samples)
    assert sum(row.weight for row in rows) == pytest.approx(1.0)
    loads = [sum(len(row.sample.ids) for row in part) for part in parts]
    assert max(loads) - min(loads) <= max(len(sample.ids) for sample in batch.samples)


def test_a_rank_without_rows_gets_one_that_trains_nothing(random_batch: MakeBatch) -> None:
    batch = random_batch(0, num_rows=2)
    idle = rank_rows(batch, rank=2, num_ranks=3)
    assert [(row.weight, row.sample.num_trained_tokens) for row in idle] == [(0.0, 0)]
    micro = to_tensors(idle, all_tokens=False, device=CPU)
    assert micro.grid(torch.zeros(0)).shape == micro.mask_BT.shape


def test_micro_batches_keep_the_token_budget(random_batch: MakeBatch) -> None:
    rows = rank_rows(random_batch(0, num_rows=40), rank=0, num_ranks=1)
    groups = cut(rows, 90)
    assert [row for group in groups for row in group] == rows
    sizes = [sum(len(row.sample.ids) - 1 for row in group) for group in groups]
    assert max(sizes) <= 90
    assert len(groups) < len(rows)


def test_a_row_over_the_budget_goes_alone(random_batch: MakeBatch) -> None:
    rows = rank_rows(random_batch(0), rank=0, num_ranks=1)
    assert cut(rows, 2) == [[row] for row in rows]


@pytest.mark.parametrize("all_tokens", [False, True])
def test_packed_tensors_hold_each_token_at_its_place(
    random_batch: MakeBatch, all_tokens: bool
) -> None:
    batch = random_batch(1)
    rows = [Row(s, w) for s, w in zip(batch.samples, batches.weights(batch), strict=True)]
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
        micro.rows.selected_S.tolist(),
        micro.rows.labels_S.tolist(),
        strict=True,
    )
    assert list(found) == wanted
    assert micro.rows.ids_N.tolist() == [t for row in rows for t in row.sample.ids[:-1]]


def test_values_are_laid_out_under_their_masks(random_batch: MakeBatch) -> None:
    rows = rank_rows(random_batch(1), rank=0, num_ranks=1)
    micro = to_tensors(rows, all_tokens=False, device=CPU)
    grid_BT = micro.grid(torch.ones(len(micro.row_S)))
    assert torch.equal(grid_BT, micro.mask_BT)
    for row, logp_T, token_T in zip(rows, micro.old_logp_BT, micro.token_BT, strict=True):
        length = len(row.sample.ids) - 1
        assert logp_T[:length].tolist() == pytest.approx(row.sample.logprobs[1:])
        assert token_T.sum() == length
