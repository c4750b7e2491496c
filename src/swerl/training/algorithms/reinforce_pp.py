"""REINFORCE++: token ratios, advantages scaled over the whole step (arXiv 2501.03262).

Users type `reinforce-pp`, because a module's name cannot hold a plus sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._policy_gradient import (
    PolicyGradient,
    PolicyOptions,
    clipped_loss,
    group_advantages,
    scale_over_step,
)

CLIP = 0.2
"""How far a token's ratio may fall below 1 or rise above it; PPO's value."""


class Options(PolicyOptions):
    baseline: Literal["group", "step"] = "group"
    """Baseline of a reward: its Group's mean (the paper's "w/ Baseline", for several attempts at a
    Task) or the mean of the step (its plain form)."""


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
        return clipped_loss(inputs, self.options, low=CLIP, high=CLIP)


build = ReinforcePp
