"""Build the transformer layers: specification, norms, and a layer that replays recorded experts."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from swerl.core.chat import Json
from swerl.core.errors import TrainerError
from swerl.training.rank.attention import PackedAttention
from swerl.training.rank.context import Forest
from swerl.training.rank.fused import rms_norm, rotate_by_position
from swerl.training.rank.gated_delta import GatedDeltaNet
from swerl.training.rank.moe import GroupedExperts, ReplayRouter, RouterRules


def block_spec(config: TransformerConfig, shapes: Mapping[str, Json]) -> TransformerBlockSubmodules:
    """Return the layers that this rank's pipeline stage builds.

    `shapes` is what MegatronMapping.config returns: its `layers` and its `router` are read.
    """
    layers, router = shapes["layers"], shapes["router"]
    assert isinstance(layers, list)
    assert isinstance(router, Mapping)
    with_experts = [bool(layer["experts"]) for layer in layers if isinstance(layer, Mapping)]
    first = get_transformer_layer_offset(config)
    specs = []
    for number in range(first, first + get_num_layers_to_build(config)):
        layer = layers[number]
        assert isinstance(layer, Mapping)
        spec = _layer(config, gated_delta=layer["attention"] == "gated_delta")
        if layer["experts"]:
            spec.submodules.mlp = _experts(config, RouterRules.read(router))
            index = sum(with_experts[:number])
            spec.params = {"experts_index": index, "num_expert_layers": sum(with_experts)}
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer(config: TransformerConfig, *, gated_delta: bool) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.module = PackedLayer
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if gated_delta:
        parts.self_attention = ModuleSpec(module=GatedDeltaNet)
        return layer
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    rope_utils._apply_rotary_pos_emb_bshd = rotate_by_position
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _experts(config: TransformerConfig, rules: RouterRules) -> Any:
    spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    # Newer releases of Megatron-Core return a partial function.
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    parts.experts = GroupedExperts
    parts.router = partial(ReplayRouter, rules=rules)
    return spec


def check_divides(
    transformer: Mapping[str, Json], model: Mapping[str, Json], tensor_ranks: int
) -> None:
    """Raise TrainerError if the model does not divide over the tensor-parallel ranks."""
    sizes: Sequence[tuple[str, Json]] = (
        ("attention heads", transformer["num_attention_heads"]),
        ("query groups", transformer["num_query_groups"]),
        ("feed-forward width", transformer["ffn_hidden_size"]),
        ("linear attention's key heads", transformer.get("linear_num_key_heads", 0)),
        ("shared experts' width", transformer.get("moe_shared_expert_intermediate_size", 0)),
        ("vocabulary", model["vocab_size"]),
    )
    for name, size in sizes:
        assert isinstance(size, int)
        if size % tensor_ranks:
            raise TrainerError(
                f"the model's {name} ({size}) does not divide by tensor_parallel={tensor_ranks}",
                hint="choose a tensor_parallel that divides it",
            )


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm; if the config's gammas are centred at zero (Qwen3.5), the factor is
    one plus the weight."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.adds_one = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, adds_one=self.adds_one)


@dataclass
class RowParams(PackedSeqParams):  # type: ignore[misc]  # megatron-core ships no types
    """Bounds of packed rows, their shared prefixes, and the experts that the engine chose."""

    routed_NLK: torch.Tensor | None = None
    """By position of this context rank, layer of the whole model, and choice.

    The layers are all of the model's, as SGLang records them, or only those with experts.
    """
    forest: Forest | None = None
    """None if no row shares a prefix with another."""


class PackedLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core ships no types
    """A transformer layer on packed rows that passes recorded experts to its router.

    Megatron passes `packed_seq_params` to every layer, also when it recomputes a layer. So a layer
    always gets the record of the current micro-batch, whatever the pipeline's order is.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: Any,
        experts_index: int | None = None,
        num_expert_layers: int = 0,
        **named: Any,
    ) -> None:
        """`experts_index` is the number of layers with experts before this one, or None."""
        super().__init__(config, *arguments, **named)
        self._experts_index = experts_index
        self._num_expert_layers = num_expert_layers

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the layer; its router, if there is one, first gets its part of the record."""
        if self._experts_index is not None:
            router = self.mlp.router
            assert isinstance(router, ReplayRouter)
            router.replay_NK = self._record(named.get("packed_seq_params"))
        return super().forward(*arguments, **named)

    def _record(self, rows: PackedSeqParams | None) -> torch.Tensor | None:
        routed_NLK = getattr(rows, "routed_NLK", None)
        if routed_NLK is None:
            return None
        _, num_layers, num_chosen = routed_NLK.shape
        index_of = {self.config.num_layers: self.layer_number - 1}
        index_of[self._num_expert_layers] = self._experts_index
        if num_layers not in index_of or num_chosen != self.config.moe_router_topk:
            raise TrainerError(
                f"the engine recorded {num_chosen} experts in {num_layers} layers, the model has "
                f"{self.config.moe_router_topk} in {self._num_expert_layers}",
                hint="engine and trainer must use the same model",
            )
        routed_NK: torch.Tensor = routed_NLK[:, index_of[num_layers]]
        if not self.config.sequence_parallel:
            return routed_NK
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        own_NK: torch.Tensor = torch.chunk(routed_NK, ranks)[
            parallel_state.get_tensor_model_parallel_rank()
        ]
        return own_NK
