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

CLIP = 0.2
"""How far a token's ratio may fall below 1 or rise above it; the value of PPO and of the paper."""


class Options(PolicyOptions):
    token_budget: int = Field(1024, ge=1)
    """Divisor of each Episode's sum, long or short. The paper uses the longest reply allowed; set
    it to the most tokens that `rollout` lets an Episode sample."""


class DrGrpo(PolicyGradient[Options]):
    divides_by_deviation = False

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, summed over tokens and divided by a constant.

        Section 3.2 and its listing: the factor 1 / |o| of GRPO is replaced by a fixed budget.
        """
        mean = partial(budget_mean, budget=self.options.token_budget)
        return clipped_loss(inputs, self.options, low=CLIP, high=CLIP, mean=mean)


build = DrGrpo
