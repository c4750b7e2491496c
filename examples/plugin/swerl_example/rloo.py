"""An algorithm: REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult


class Options(BaseModel):
    """Settings of RLOO: the keys of `[algorithm]` with `type = "rloo"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float = Field(1.0, gt=0)
    """Factor of all advantages; the paper uses 1."""


class Rloo:
    """Implements Algorithm."""

    needs_reference = False
    needs_context = False

    def __init__(self, options: Options) -> None:
        self._options = options

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return reward less the mean reward of the Group's other attempts (eq. 5)."""
        return [self._of_group(group) for group in groups]

    def _of_group(self, group: Group) -> list[float]:
        rewards = [episode.reward for episode in group.episodes if episode.learnable]
        if len(rewards) < 2:
            return [0.0] * len(group.episodes)
        total, others = sum(rewards), len(rewards) - 1
        return [
            self._options.scale * (each.reward - (total - each.reward) / others)
            if each.learnable
            else 0.0
            for each in group.episodes
        ]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return -advantage x log-probability, the mean over each row's trained tokens.

        `weight_B` gives every Episode one vote, however many rows it became.
        """
        num_tokens_B = inputs.mask_BT.sum(1).clamp(min=1)
        logp_B = (inputs.logp_BT * inputs.mask_BT).sum(1) / num_tokens_B
        loss = -(inputs.weight_B * inputs.advantage_B * logp_B).sum()
        return LossResult(loss, {"mean_logp": float((inputs.weight_B * logp_B.detach()).sum())})


def build(options: Options) -> Rloo:
    """Build the algorithm from its validated settings."""
    return Rloo(options)
