"""What policy-gradient algorithms share. Axes: B rows, T positions."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import TYPE_CHECKING

from swerl.episode import Group

if TYPE_CHECKING:
    import torch

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""


def group_advantages(group: Group, *, normalize_std: bool) -> list[float]:
    """Return each Episode's reward less the Group's mean, over the standard deviation if asked.

    Mean and sample standard deviation are over the learnable Episodes only; the others get 0, and
    so does everybody where all rewards are equal or a single Episode is left.
    """
    rewards = [episode.reward for episode in group.episodes if episode.learnable]
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(group.episodes)
    mean = fmean(rewards)
    scale = stdev(rewards) + STD_FLOOR if normalize_std else 1.0
    return [
        (episode.reward - mean) / scale if episode.learnable else 0.0 for episode in group.episodes
    ]


def row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `mean_B`, the mean over each row's masked positions; 0 for a row without any."""
    return (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def kl_to_reference(logp_BT: torch.Tensor, ref_logp_BT: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(policy || reference) per token; never negative.

    J. Schulman, "Approximating KL divergence" (2020): r - 1 - log r with r = ref / policy.
    """
    log_ratio_BT = ref_logp_BT - logp_BT
    return log_ratio_BT.expm1() - log_ratio_BT
