"""CISPO: REINFORCE with a clipped weight; no token loses its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    GroupOptions,
    PolicyGradient,
    Surrogate,
    bounded,
    policy_loss,
    token_mean,
)

if TYPE_CHECKING:
    import torch


class Options(GroupOptions):
    ratio_low: float = Field(0.0, ge=0)
    """Least weight of a token; the paper sets no lower bound."""
    ratio_high: float = Field(5.0, gt=0)
    """Largest weight of a token. The paper tunes it and prints no number. 5 limits only tokens that
    became much likelier."""


class Cispo(PolicyGradient[Options]):
    def loss(self, inputs: LossInputs) -> LossResult:
        """Return minus the clipped ratio, without gradient, times A log p (eq. 4 and 5).

        The mean is over all tokens of the whole batch; the paper writes it for one Group.
        """

        def objective(log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor) -> Surrogate:
            ratio_BT = bounded(log_ratio_BT.detach()).exp()
            weight_BT = ratio_BT.clamp(self.options.ratio_low, self.options.ratio_high)
            gain_BT = weight_BT * advantage_BT * inputs.logp_BT
            return Surrogate(gain_BT, ratio_BT, weight_BT != ratio_BT)

        return policy_loss(inputs, self.options, objective, token_mean)


build = Cispo
