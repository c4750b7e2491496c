"""Means over the trained tokens of a batch. Axes: B rows, T positions.

Each is a sum over rows, so that the parts of micro-batches and ranks add up to the batch's. None
of them changes when an Episode's tokens are spread over more rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swerl.core.learning import LossInputs

if TYPE_CHECKING:
    import torch


def row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `mean_B`, the mean over each row's masked positions; 0 for a row without any."""
    return (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def episode_mean(values_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return the mean over each Episode's tokens, then over Episodes: one vote each.

    A row weighs its share of its Episode's tokens, so the rows' means add up to the Episode's.
    """
    return (inputs.weight_B * row_means(values_BT, inputs.mask_BT)).sum()


def token_mean(values_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return the mean over all tokens of the batch: an Episode counts by its tokens."""
    return (values_BT * inputs.mask_BT).sum() / max(inputs.totals.num_tokens, 1)


def budget_mean(values_BT: torch.Tensor, inputs: LossInputs, budget: int) -> torch.Tensor:
    """Return each Episode's sum over a fixed number of tokens, then the mean over Episodes."""
    return (values_BT * inputs.mask_BT).sum() / (max(inputs.totals.num_episodes, 1) * budget)
