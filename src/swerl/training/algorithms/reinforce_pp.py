"""REINFORCE++: token ratios, advantages scaled over the whole step (arXiv 2501.03262).

Users type `reinforce-pp`, because a module's name cannot hold a plus sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    PolicyGradient,
    PolicyOptions,
    clipped_loss,
    group_advantages,
    scale_over_step,
)


class Options(PolicyOptions):
    clip_low: float = Field(0.2, gt=0, le=1)
    """How far a token's ratio may fall below 1; PPO's value."""
    clip_high: float = Field(0.2, gt=0)
    """How far a token's ratio may rise above 1; PPO's value."""
    baseline: Literal["group", "step"] = "group"
    """Baseline of a reward: its Group's mean (the paper's "w/ Baseline", for several attempts at a
    Task) or the mean of the step (its plain form)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the initial policy. The paper puts k1 in the reward for the
    plain form, and k2 in the loss with a baseline."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of a token's divergence; k2 has the right gradient in the loss."""


class ReinforcePp(PolicyGradient[Options]):
    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return rewards less their baseline, over the standard deviation of the step (eq. 10).

        Mean and deviation are over Episodes, before any KL: a divergence in the reward is
        subtracted later and is not scaled.
        """
        if self.options.baseline == "group":
            centred = [group_advantages(group, normalize_std=False) for group in groups]
            return scale_over_step(groups, centred, centre=False)
        rewards = [[episode.reward for episode in group.episodes] for group in groups]
        return scale_over_step(groups, rewards, centre=True)

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over each Episode's tokens."""
        low, high = self.options.clip_low, self.options.clip_high
        return clipped_loss(inputs, self.options, low=low, high=high)


build = ReinforcePp
