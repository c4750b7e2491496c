"""SFT: supervised learning of kept Episodes, and of the warm start's demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    context_weight: float = Field(0.0, ge=0, le=1)
    """Weight of a context token's cross-entropy against a trained token's. 0 trains the replies
    alone; above it, a new model also learns the words of its prompts."""


class Sft:
    needs_reference = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs_context = options.context_weight > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        return [[0.0] * len(group.episodes) for group in groups]

    def loss(self, inputs: LossInputs) -> LossResult:
        """Return the cross-entropy, the weighted mean over each row's tokens."""
        context_BT = inputs.token_BT - inputs.mask_BT
        weight_BT = inputs.mask_BT + self._options.context_weight * context_BT
        nll_B = -(inputs.logp_BT * weight_BT).sum(1) / weight_BT.sum(1).clamp(min=1e-6)
        trained_nll_B = -(inputs.logp_BT * inputs.mask_BT).sum(1) / inputs.mask_BT.sum(1).clamp(1)
        loss = (inputs.weight_B * nll_B).sum()
        stats = {"nll": float((inputs.weight_B * trained_nll_B.detach()).sum())}
        return LossResult(loss, stats)


build = Sft
