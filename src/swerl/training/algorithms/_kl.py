"""Estimates of KL(policy || reference) per token. Axes: B rows, T positions.

J. Schulman, "Approximating KL divergence" (2020), with d = log policy - log reference:
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss, k2 has the gradient of the divergence, k3 a
first-order approximation of it, and k1 none on average; in the reward, k1 has it (K. Liu et al.,
"Rethinking KL Regularization in RLHF", arXiv 2510.01555).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def estimate(name: str, logp_BT: torch.Tensor, ref_logp_BT: torch.Tensor) -> torch.Tensor:
    """Return the estimate of this name per token."""
    gap_BT = logp_BT - ref_logp_BT
    if name == "k1":
        return gap_BT
    if name == "k2":
        return gap_BT.square() / 2
    return (-gap_BT).expm1() + gap_BT


def to_go(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return each token's sum over itself and the trained tokens behind it in its row.

    REINFORCE++ (arXiv 2501.03262), eq. 8: a token's advantage is r - beta * sum of KL from t to T.
    """
    return (values_BT * mask_BT).flip(1).cumsum(1).flip(1)
