"""GSPO: policy gradient on the ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms._advantages import group_advantages
from swerl.training.algorithms._options import PolicyOptions
from swerl.training.algorithms._policy import policy_loss
from swerl.training.algorithms._surrogate import Surrogate, clipped, sequence_log_ratio

if TYPE_CHECKING:
    import torch


class Options(PolicyOptions):
    """Settings of GSPO."""

    clip_low: float = Field(3e-4, gt=0)
    """How far a sequence ratio may fall below 1; the paper's value (section 5.1)."""
    clip_high: float = Field(4e-4, gt=0)
    """How far a sequence ratio may rise above 1; the paper's value (section 5.1)."""
    normalize_std: bool = True
    """Whether advantages are divided by the Group's standard deviation; the paper does."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL divergence to the initial policy; small models collapse without it."""


class Gspo:
    """Implements Algorithm."""

    needs_context = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs_reference = options.kl_coef > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the Group-relative advantages (eq. 6)."""
        normalize_std = self._options.normalize_std
        return [group_advantages(group, normalize_std=normalize_std) for group in groups]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on length-normalised sequence ratios (eq. 5 and 7).

        A Sample is one sequence; its weight makes the mean one over Episodes.
        """
        low, high = self._options.clip_low, self._options.clip_high

        def objective(log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor) -> Surrogate:
            log_ratio_BT = sequence_log_ratio(log_ratio_BT, inputs.mask_BT)
            return clipped(log_ratio_BT, advantage_BT, low, high)

        return policy_loss(inputs, self._options, objective)


def build(options: Options) -> Gspo:
    """Build the algorithm."""
    return Gspo(options)
