"""GRPO: policy gradient on the ratio of single tokens (arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._advantages import group_advantages
from swerl.training.algorithms._options import PolicyOptions
from swerl.training.algorithms._policy import policy_loss
from swerl.training.algorithms._surrogate import clipped


class Options(PolicyOptions):
    """Settings of GRPO."""

    clip_low: float = Field(0.2, gt=0)
    """How far a token's ratio may fall below 1; the value of PPO and of the paper."""
    clip_high: float = Field(0.2, gt=0)
    """How far a token's ratio may rise above 1; DAPO (arXiv 2503.14476) raises it to 0.28."""
    normalize_std: bool = True
    """Whether advantages are divided by the Group's standard deviation; the paper does."""
    kl_coef: float = Field(0.04, ge=0)
    """Weight of the KL divergence to the initial policy; the paper's value."""


class Grpo:
    """Implements Algorithm."""

    needs_context = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs_reference = options.kl_coef > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the Group-relative advantages (section 4.1.2)."""
        normalize_std = self._options.normalize_std
        return [group_advantages(group, normalize_std=normalize_std) for group in groups]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over each Episode's tokens (eq. 3)."""
        low, high = self._options.clip_low, self._options.clip_high
        return policy_loss(
            inputs,
            self._options,
            lambda log_ratio_BT, advantage_BT: clipped(log_ratio_BT, advantage_BT, low, high),
        )


def build(options: Options) -> Grpo:
    """Build the algorithm."""
    return Grpo(options)
