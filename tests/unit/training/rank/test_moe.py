"""What decides whether a record of experts is replayed, and experts multiplied in one call."""

from __future__ import annotations

import torch

from swerl.training.rank.moe import _is_record, _multiply_grouped, _multiply_in_turn


def test_only_a_whole_record_of_different_experts_is_replayed() -> None:
    records_NK = torch.tensor([[0, 3], [3, 0], [-1, -1], [2, -1], [2, 2], [1, 4]])
    found = _is_record(records_NK, num_experts=4).squeeze(1)
    assert found.tolist() == [True, True, False, False, False, False]


def test_experts_multiplied_in_one_call_equal_those_in_turn() -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([3, 0, 5, 1])
    results = []
    for multiply in (_multiply_grouped, _multiply_in_turn):
        torch.manual_seed(1)
        x_TI = torch.randn(9, 16, requires_grad=True)
        weight_EOI = torch.randn(4, 8, 16, requires_grad=True)
        out_TO = multiply(x_TI, weight_EOI, tokens)
        (out_TO * torch.arange(8.0)).square().sum().backward()
        results.append((out_TO, x_TI.grad, weight_EOI.grad))

    for grouped, in_turn in zip(*results, strict=True):
        assert grouped is not None and in_turn is not None
        torch.testing.assert_close(grouped, in_turn)
