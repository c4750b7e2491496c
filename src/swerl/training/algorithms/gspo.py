"""GSPO: policy gradient on the ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    GroupOptions,
    PolicyGradient,
    Surrogate,
    clipped,
    policy_loss,
    sequence_log_ratio,
)

if TYPE_CHECKING:
    import torch


class Options(GroupOptions):
    clip_low: float = Field(3e-4, gt=0, le=1)
    """How far a sequence ratio may fall below 1; the paper's value (section 5.1)."""
    clip_high: float = Field(4e-4, gt=0)
    """How far a sequence ratio may rise above 1; the paper's value (section 5.1)."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL divergence to the initial policy; small models collapse without it."""


class Gspo(PolicyGradient[Options]):
    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on length-normalised sequence ratios (eq. 5 and 7).

        A Sample is one sequence; its weight makes the mean one over Episodes.
        """

        def objective(log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor) -> Surrogate:
            log_ratio_BT = sequence_log_ratio(log_ratio_BT, inputs.mask_BT)
            options = self.options
            return clipped(log_ratio_BT, advantage_BT, options.clip_low, options.clip_high)

        return policy_loss(inputs, self.options, objective)


build = Gspo
