"""Routed experts in Megatron-Core's MoE layer: a router that can replay, and stacked experts.

Routing replay (R3, arXiv 2510.11370): engine and trainer round differently, so sometimes they
choose different experts for a token. If the engine recorded its choices, the router repeats them in
the forward pass and in its recomputation. Their weights come from this router's own logits, so
gradients reach it.

Axes: N tokens of this rank, E experts (of this rank, in GroupedExperts), K experts of a token, T
tokens sent to this rank's experts, sorted by expert, F an expert's width, H hidden.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from swerl.core.chat import Json
from swerl.training.rank.fused import wide_linear


@dataclass(frozen=True, slots=True)
class RouterRules:
    """Rules that turn logits into scores, and scores into weights."""

    sigmoid: bool = False
    normalised: bool = True
    scale: float = 1.0
    bias: bool = False

    @classmethod
    def read(cls, settings: Mapping[str, Json]) -> RouterRules:
        scale = settings["scale"]
        assert isinstance(scale, float)
        return cls(
            sigmoid=bool(settings["sigmoid"]),
            normalised=bool(settings["normalised"]),
            scale=scale,
            bias=bool(settings["bias"]),
        )


class ReplayRouter(TopKRouter):  # type: ignore[misc]  # megatron-core ships no types
    """Choose experts by score, or repeat recorded choices."""

    replay_NK: torch.Tensor | None = None
    """Recorded choices of the current tokens, -1 without a record; set before each pass."""

    def __init__(self, config: TransformerConfig, *, rules: RouterRules, **groups: object) -> None:
        super().__init__(config=config, **groups)
        self.rules = rules
        self.expert_bias: torch.nn.Parameter | None
        if rules.bias:
            # Megatron keeps it in a buffer and updates it by load. Here it stays as published:
            # engine and trainer must choose alike.
            del self.expert_bias
            bias = torch.zeros(config.num_moe_experts, device=torch.cuda.current_device())
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        # In fp32, because rounding can change the choice of experts.
        return wide_linear(input, self.weight)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and choices as (N, E): 0 and False for an expert that is not chosen."""
        logits_NE = logits.reshape(-1, logits.shape[-1])
        scores_NE = logits_NE.sigmoid() if self.rules.sigmoid else logits_NE.softmax(-1)
        chosen_NK = self._choose(scores_NE)
        weights_NK = scores_NE.gather(1, chosen_NK)
        if self.rules.normalised:
            # The small term prevents a division by zero.
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        weights_NE = torch.zeros_like(scores_NE).scatter(
            1, chosen_NK, weights_NK * self.rules.scale
        )
        is_chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter(1, chosen_NK, True)
        return weights_NE, is_chosen_NE

    def _choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            # The bias changes the choice of experts, but not their weights.
            ranked_NE = scores_NE if self.expert_bias is None else scores_NE + self.expert_bias
            own_NK = ranked_NE.topk(self.topk, dim=-1).indices
            if self.replay_NK is None:
                return own_NK
            replay_NK = self.replay_NK.to(own_NK)
            # A token without a full record gets the router's own choice.
            return torch.where(_is_record(replay_NK, scores_NE.shape[1]), replay_NK, own_NK)


class GroupedExperts(torch.nn.Module):
    """This rank's experts: gated feed-forward blocks whose weights are stacked."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **unused: object) -> None:
        super().__init__()
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        width, hidden = config.moe_ffn_hidden_size // ranks, config.hidden_size
        device, dtype = torch.cuda.current_device(), config.params_dtype
        empty = torch.empty
        self.fc1 = _of_experts(
            empty(num_local_experts, 2, width, hidden, device=device, dtype=dtype)
        )
        self.fc2 = _of_experts(empty(num_local_experts, hidden, width, device=device, dtype=dtype))

    def forward(
        self, x_TH: torch.Tensor, tokens_per_expert: torch.Tensor, weights_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        both_TF = self._multiply("fc1", x_TH, tokens_per_expert)
        # The router's weight may come before the second matrix, because that is linear.
        inner_TF = weighted_bias_swiglu_impl(both_TF, None, weights_T.unsqueeze(-1))
        return self._multiply("fc2", inner_TF, tokens_per_expert), None

    def _multiply(
        self, name: str, x_TI: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        """Multiply each token with its expert's matrix, and with the adapter's if there is one."""
        is_grouped = x_TI.is_cuda and x_TI.dtype is torch.bfloat16  # the kernel supports no other
        multiply = _multiply_grouped if is_grouped else _multiply_in_turn
        out_TO: torch.Tensor = multiply(x_TI, getattr(self, name).flatten(1, -2), tokens_per_expert)
        adapter = getattr(self, f"{name}_lora", None)
        if adapter is None or not adapter.active:
            return out_TO
        A_ERI, B_EOR = adapter.of_experts()
        inner_TR = multiply(x_TI, A_ERI, tokens_per_expert)
        out_TO += multiply(inner_TR, B_EOR, tokens_per_expert) * adapter.scale
        return out_TO


def _is_record(replay_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return for each token, as (N, 1), whether its record has K different experts."""
    # After sorting, K different experts are strictly increasing.
    sorted_NK = replay_NK.sort(-1).values
    within = (sorted_NK[:, :1] >= 0) & (sorted_NK[:, -1:] < num_experts)
    return within & (sorted_NK.diff(dim=-1) > 0).all(-1, keepdim=True)


def _of_experts(value: torch.Tensor) -> torch.nn.Parameter:
    """Return an expert parameter, whose gradients the expert-data ranks sum.

    Megatron sets this mark only if expert_parallel > 1. Without it, gradients of experts that are
    not split over tensor ranks would be summed over too few ranks.
    """
    parameter = torch.nn.Parameter(value)
    vars(parameter).update(
        allreduce=False, tensor_model_parallel=True, partition_dim=2, partition_stride=1
    )
    return parameter


def _multiply_grouped(
    x_TI: torch.Tensor, weight_EOI: torch.Tensor, tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    # A blocking copy would wait for all kernels before it.
    counts = tokens_per_expert.to(x_TI.device, non_blocking=True)
    ends = counts.cumsum(0, dtype=torch.int32)
    out_TO: torch.Tensor = F.grouped_mm(x_TI, weight_EOI.mT, offs=ends)
    return out_TO


def _multiply_in_turn(
    x_TI: torch.Tensor, weight_EOI: torch.Tensor, tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    parts = torch.split(x_TI, tokens_per_expert.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_EOI, strict=True)])
