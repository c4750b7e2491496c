"""DAPO: GRPO with a decoupled clip and a mean over all tokens (arXiv 2503.14476).

Its two other parts are settings of the rollout and serve every algorithm: dynamic sampling (eq. 11)
is `rollout.group_filter`, overlong shaping (eq. 13) a rule of `rollout.shaping`.
"""

from __future__ import annotations

from pydantic import Field

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    GroupOptions,
    PolicyGradient,
    clipped_loss,
    token_mean,
)


class Options(GroupOptions):
    clip_low: float = Field(0.2, gt=0, le=1)
    """How far a token's ratio may fall below 1; the paper's value (section 4.1)."""
    clip_high: float = Field(0.28, gt=0)
    """How far a token's ratio may rise above 1; the paper's value (section 4.1)."""


class Dapo(PolicyGradient[Options]):
    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over all tokens (eq. 8).

        The mean is over the whole batch; the paper writes it for the tokens of one Group.
        """
        low, high = self.options.clip_low, self.options.clip_high
        return clipped_loss(inputs, self.options, low=low, high=high, mean=token_mean)


build = Dapo
