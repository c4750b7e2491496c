"""DAPO: GRPO with a decoupled clip and a mean over all tokens (arXiv 2503.14476).

Its two other parts are settings of the rollout and serve every algorithm: dynamic sampling (eq. 11)
is `rollout.group_filter`, overlong shaping (eq. 13) a rule of `rollout.shaping`.
"""

from __future__ import annotations

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    PolicyGradient,
    PolicyOptions,
    clipped_loss,
    token_mean,
)

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far a token's ratio may fall below 1 and rise above it; the paper's values (section 4.1)."""


class Options(PolicyOptions):
    pass


class Dapo(PolicyGradient[Options]):
    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over all tokens (eq. 8).

        The mean is over the whole batch; the paper writes it for the tokens of one Group.
        """
        return clipped_loss(inputs, self.options, low=CLIP_LOW, high=CLIP_HIGH, mean=token_mean)


build = Dapo
