"""What a token contributes to the objective, from its ratio and its advantage.

Axes: B rows, T positions. Log-ratios are new over old, and 0 on tokens that are not trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swerl.training.algorithms._reduce import row_means

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A token's part of the objective, and figures without gradient."""

    gain_BT: torch.Tensor
    """What is maximised."""
    ratio_BT: torch.Tensor
    is_clipped_BT: torch.Tensor
    """1 where the clip took the gradient away, or a part of it."""


def clipped(
    log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor, low: float, high: float
) -> Surrogate:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) per token.

    J. Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7.
    """
    import torch

    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT * advantage_BT
    gain_BT = torch.minimum(free_BT, ratio_BT.clamp(1 - low, 1 + high) * advantage_BT)
    return Surrogate(gain_BT, ratio_BT.detach(), gain_BT < free_BT)


def sequence_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return each row's mean log-ratio at every token, with the gradient of that token alone.

    The token form of the sequence ratio, GSPO (arXiv 2507.18071), section 4.3: value and gradient
    of a row's mean are those of its one ratio, and tokens may be weighted apart.
    """
    mean_B1 = row_means(log_ratio_BT, mask_BT).unsqueeze(1).detach()
    return mean_B1 + log_ratio_BT - log_ratio_BT.detach()
