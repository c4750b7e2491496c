"""GRPO: policy gradient on the ratio of single tokens (arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from swerl.algorithms._policy import group_advantages, kl_to_reference, row_means
from swerl.episode import Group
from swerl.learning import LossInputs, LossResult

if TYPE_CHECKING:
    import torch


class Options(BaseModel):
    """Settings of GRPO."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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

    def advantages(self, group: Group) -> Sequence[float]:
        """Return the Group-relative advantages."""
        return group_advantages(group, normalize_std=self._options.normalize_std)

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on token ratios, the mean over each Sample's tokens (eq. 3)."""
        import torch

        options = self._options
        ratio_BT = ((inputs.logp_BT - inputs.old_logp_BT) * inputs.mask_BT).exp()
        clipped_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high)
        advantage_B1 = inputs.advantage_B.unsqueeze(1)
        free_BT = ratio_BT * advantage_B1
        gain_BT = torch.minimum(free_BT, clipped_BT * advantage_B1)
        loss = -(inputs.weight_B * row_means(gain_BT, inputs.mask_BT)).sum()
        is_clipped_BT = (gain_BT < free_BT).float()
        stats = {
            "policy_loss": float(loss.detach()),
            "ratio": _mean(ratio_BT.detach(), inputs),
            "clip_fraction": _mean(is_clipped_BT, inputs),
        }
        if inputs.ref_logp_BT is not None:
            kl_BT = kl_to_reference(inputs.logp_BT, inputs.ref_logp_BT)
            kl = (inputs.weight_B * row_means(kl_BT, inputs.mask_BT)).sum()
            loss = loss + options.kl_coef * kl
            stats["kl"] = float(kl.detach())
        return LossResult(loss, stats)


def _mean(values_BT: torch.Tensor, inputs: LossInputs) -> float:
    return float((inputs.weight_B * row_means(values_BT, inputs.mask_BT)).sum())


def build(options: Options) -> Grpo:
    """Build the algorithm."""
    return Grpo(options)
