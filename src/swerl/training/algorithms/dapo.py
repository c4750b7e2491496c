"""DAPO: GRPO with a decoupled clip and a mean over all tokens (arXiv 2503.14476).

Its two other parts are settings of the rollout, and serve every algorithm: dynamic sampling
(eq. 11) is `rollout.group_filter`, overlong shaping (eq. 13) a rule of `rollout.shaping`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._advantages import group_advantages
from swerl.training.algorithms._options import PolicyOptions
from swerl.training.algorithms._policy import policy_loss
from swerl.training.algorithms._reduce import token_mean
from swerl.training.algorithms._surrogate import clipped


class Options(PolicyOptions):
    """Settings of DAPO."""

    clip_low: float = Field(0.2, gt=0)
    """How far a token's ratio may fall below 1; the paper's value (section 4.1)."""
    clip_high: float = Field(0.28, gt=0)
    """How far a token's ratio may rise above 1; the paper's value (section 4.1)."""
    normalize_std: bool = True
    """Whether advantages are divided by the Group's standard deviation; the paper does."""


class Dapo:
    """Implements Algorithm."""

    needs_context = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs_reference = options.kl_coef > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the Group-relative advantages (eq. 9)."""
        normalize_std = self._options.normalize_std
        return [group_advantages(group, normalize_std=normalize_std) for group in groups]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over all tokens (eq. 8).

        The paper writes the mean over the tokens of one Group; it is one over the whole batch
        here, as for a batch that is a single Group.
        """
        low, high = self._options.clip_low, self._options.clip_high
        return policy_loss(
            inputs,
            self._options,
            lambda log_ratio_BT, advantage_BT: clipped(log_ratio_BT, advantage_BT, low, high),
            token_mean,
        )


def build(options: Options) -> Dapo:
    """Build the algorithm."""
    return Dapo(options)
