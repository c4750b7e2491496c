"""Weights that correct for an engine whose probabilities differ from the trainer's.

The ratio of a token is rho = trainer / engine, both before the step, without gradient. Axes: B
rows, T positions.

- Truncated importance sampling (`*-tis`): F. Yao et al., "Your Efficient RL Framework Secretly
  Brings You Off-Policy RL Training" (2025): min(rho, C) with C = 2.
- Masked importance sampling (`*-mis`) and its geometric form: J. Liu, Y. Li et al., "When Speed
  Kills Stability" (2025), parts 2 and 3: rho where rho <= C, else 0; a whole row goes where the
  geometric mean of its ratios is out of bounds.
- IcePop: Ling Team, "Every Step Evolves" (arXiv 2510.18855): rho where 0.5 <= rho <= 5, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swerl.core.learning import LossInputs
from swerl.training.algorithms._options import Mismatch, PolicyOptions
from swerl.training.algorithms._reduce import row_means

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Correction:
    """What each token's gain is multiplied by."""

    weight_BT: torch.Tensor
    is_cut_BT: torch.Tensor
    """1 where the ratio was out of bounds."""


def correct(inputs: LossInputs, options: PolicyOptions) -> Correction:
    """Return the weights of the rule that the options name; it must not be `none`."""
    import torch

    rule = options.mismatch
    low, high = options.mismatch_bounds
    log_ratio_BT = (inputs.logp_BT.detach() - inputs.old_logp_BT) * inputs.mask_BT
    if rule in (Mismatch.SEQUENCE_TIS, Mismatch.SEQUENCE_MIS):
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    elif rule is Mismatch.GEOMETRIC_MIS:
        mean_B1 = row_means(log_ratio_BT, inputs.mask_BT).unsqueeze(1)
        log_ratio_BT = mean_B1.expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.exp()
    is_cut_BT = (ratio_BT < low) | (ratio_BT > high)
    if rule in (Mismatch.TOKEN_TIS, Mismatch.SEQUENCE_TIS):
        return Correction(ratio_BT.clamp(low, high), is_cut_BT)
    kept_BT = torch.ones_like(ratio_BT) if rule is Mismatch.GEOMETRIC_MIS else ratio_BT
    return Correction(kept_BT.masked_fill(is_cut_BT, 0.0), is_cut_BT)
