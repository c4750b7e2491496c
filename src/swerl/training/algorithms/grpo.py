"""GRPO: policy gradient on the ratio of single tokens (arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from pydantic import Field

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import GroupOptions, PolicyGradient, clipped_loss


class Options(GroupOptions):
    clip_low: float = Field(0.2, gt=0, le=1)
    """How far a token's ratio may fall below 1; the value of PPO and of the paper."""
    clip_high: float = Field(0.2, gt=0)
    """How far a token's ratio may rise above 1; DAPO (arXiv 2503.14476) raises it to 0.28."""
    kl_coef: float = Field(0.04, ge=0)
    """Weight of the KL divergence to the initial policy; the paper's value."""


class Grpo(PolicyGradient[Options]):
    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over each Episode's tokens (eq. 3)."""
        low, high = self.options.clip_low, self.options.clip_high
        return clipped_loss(inputs, self.options, low=low, high=high)


build = Grpo
