"""Dr. GRPO: GRPO without its two biases, of length and of difficulty (arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pydantic import Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._advantages import group_advantages
from swerl.training.algorithms._options import PolicyOptions
from swerl.training.algorithms._policy import policy_loss
from swerl.training.algorithms._reduce import budget_mean
from swerl.training.algorithms._surrogate import clipped


class Options(PolicyOptions):
    """Settings of Dr. GRPO."""

    clip_low: float = Field(0.2, gt=0)
    """How far a token's ratio may fall below 1; the value of PPO and of the paper."""
    clip_high: float = Field(0.2, gt=0)
    """How far a token's ratio may rise above 1; the value of PPO and of the paper."""
    token_budget: int = Field(1024, ge=1)
    """What each Episode's sum is divided by, long or short; the paper takes the most tokens that a
    reply may have. Set it to what `rollout` lets an Episode sample."""


class DrGrpo:
    """Implements Algorithm."""

    needs_context = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs_reference = options.kl_coef > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return rewards less their Group's mean, not divided by anything (section 3.2)."""
        return [group_advantages(group, normalize_std=False) for group in groups]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, summed over tokens and divided by a constant.

        Section 3.2 and its listing: the factor 1 / |o| of GRPO is replaced by a fixed budget.
        """
        low, high = self._options.clip_low, self._options.clip_high
        return policy_loss(
            inputs,
            self._options,
            lambda log_ratio_BT, advantage_BT: clipped(log_ratio_BT, advantage_BT, low, high),
            partial(budget_mean, budget=self._options.token_budget),
        )


def build(options: Options) -> DrGrpo:
    """Build the algorithm."""
    return DrGrpo(options)
