"""GSPO: policy gradient on the ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from swerl.algorithms._policy import group_advantages, kl_to_reference, row_means
from swerl.episode import Group
from swerl.learning import LossInputs, LossResult


class Options(BaseModel):
    """Settings of GSPO."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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

    def advantages(self, group: Group) -> Sequence[float]:
        """Return the Group-relative advantages (eq. 6)."""
        return group_advantages(group, normalize_std=self._options.normalize_std)

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the clipped loss on length-normalised sequence ratios (eq. 5 and 7).

        A Sample is one sequence; its weight makes the mean one over Episodes.
        """
        import torch

        options = self._options
        log_ratio_B = row_means(inputs.logp_BT - inputs.old_logp_BT, inputs.mask_BT)
        ratio_B = log_ratio_B.exp()
        clipped_B = ratio_B.clamp(1 - options.clip_low, 1 + options.clip_high)
        free_B = ratio_B * inputs.advantage_B
        gain_B = torch.minimum(free_B, clipped_B * inputs.advantage_B)
        loss = -(inputs.weight_B * gain_B).sum()
        is_clipped_B = (gain_B < free_B).float()
        stats = {
            "policy_loss": float(loss.detach()),
            "ratio": float((inputs.weight_B * ratio_B.detach()).sum()),
            "clip_fraction": float((inputs.weight_B * is_clipped_B).sum()),
        }
        if inputs.ref_logp_BT is not None:
            kl_BT = kl_to_reference(inputs.logp_BT, inputs.ref_logp_BT)
            kl = (inputs.weight_B * row_means(kl_BT, inputs.mask_BT)).sum()
            loss = loss + options.kl_coef * kl
            stats["kl"] = float(kl.detach())
        return LossResult(loss, stats)


def build(options: Options) -> Gspo:
    """Build the algorithm."""
    return Gspo(options)
