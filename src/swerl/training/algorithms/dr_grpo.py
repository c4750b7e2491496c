"""Dr. GRPO: GRPO without its two biases, of length and of difficulty (arXiv 2503.20783)."""

from __future__ import annotations

from functools import partial

from pydantic import Field

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    PolicyGradient,
    PolicyOptions,
    budget_mean,
    clipped_loss,
)


class Options(PolicyOptions):
    clip_low: float = Field(0.2, gt=0, le=1)
    """How far a token's ratio may fall below 1; the value of PPO and of the paper."""
    clip_high: float = Field(0.2, gt=0)
    """How far a token's ratio may rise above 1; the value of PPO and of the paper."""
    token_budget: int = Field(1024, ge=1)
    """Divisor of each Episode's sum, long or short. The paper uses the longest reply allowed; set
    it to the most tokens that `rollout` lets an Episode sample."""


class DrGrpo(PolicyGradient[Options]):
    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, summed over tokens and divided by a constant.

        Section 3.2 and its listing: the factor 1 / |o| of GRPO is replaced by a fixed budget.
        """
        mean = partial(budget_mean, budget=self.options.token_budget)
        low, high = self.options.clip_low, self.options.clip_high
        return clipped_loss(inputs, self.options, low=low, high=high, mean=mean)


build = DrGrpo
