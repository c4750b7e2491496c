"""CISPO: REINFORCE with a clipped weight; no token loses its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._advantages import group_advantages
from swerl.training.algorithms._options import PolicyOptions
from swerl.training.algorithms._policy import policy_loss
from swerl.training.algorithms._reduce import token_mean
from swerl.training.algorithms._surrogate import Surrogate

if TYPE_CHECKING:
    import torch


class Options(PolicyOptions):
    """Settings of CISPO."""

    ratio_low: float = Field(0.0, ge=0)
    """Least weight of a token; the paper sets no lower bound."""
    ratio_high: float = Field(5.0, gt=0)
    """Largest weight of a token. The paper tunes it and prints no number; at 5 only tokens that
    became much likelier are held back."""
    normalize_std: bool = True
    """Whether advantages are divided by the Group's standard deviation; the paper does."""


class Cispo:
    """Implements Algorithm."""

    needs_context = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs_reference = options.kl_coef > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the Group-relative advantages."""
        normalize_std = self._options.normalize_std
        return [group_advantages(group, normalize_std=normalize_std) for group in groups]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return minus the clipped ratio, without gradient, times A log p (eq. 4 and 5).

        The mean is over all tokens, of the whole batch where the paper writes one Group.
        """

        def objective(log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor) -> Surrogate:
            ratio_BT = log_ratio_BT.detach().exp()
            weight_BT = ratio_BT.clamp(self._options.ratio_low, self._options.ratio_high)
            gain_BT = weight_BT * advantage_BT * inputs.logp_BT
            return Surrogate(gain_BT, ratio_BT, weight_BT != ratio_BT)

        return policy_loss(inputs, self._options, objective, token_mean)


def build(options: Options) -> Cispo:
    """Build the algorithm."""
    return Cispo(options)
