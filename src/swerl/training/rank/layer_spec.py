"""Which parts the layers are built of, and which sizes of them the ranks can share."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from swerl.core.chat import Json
from swerl.core.errors import TrainerError
from swerl.training.rank.attention import PackedAttention
from swerl.training.rank.gated_delta import GatedDeltaNet
from swerl.training.rank.moe import GroupedExperts, ReplayRouter, RouterRules
from swerl.training.rank.norms import RMSNorm
from swerl.training.rank.packed_layer import PackedLayer


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
            place = sum(with_experts[:number])
            spec.params = {"experts_place": place, "num_expert_layers": sum(with_experts)}
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
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _experts(config: TransformerConfig, rules: RouterRules) -> ModuleSpec:
    spec: ModuleSpec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    spec.submodules.experts = GroupedExperts
    spec.submodules.router = partial(ReplayRouter, rules=rules)
    return spec


def check_divides(
    transformer: Mapping[str, Json], model: Mapping[str, Json], tensor_ranks: int
) -> None:
    """Raise TrainerError where the model does not divide over the tensor-parallel ranks."""
    sizes: Sequence[tuple[str, Json]] = (
        ("attention heads", transformer["num_attention_heads"]),
        ("query groups", transformer["num_query_groups"]),
        ("feed-forward width", transformer["ffn_hidden_size"]),
        ("linear attention's key heads", transformer.get("linear_num_key_heads", 0)),
        ("shared experts' width", transformer.get("moe_shared_expert_intermediate_size", 0)),
        ("vocabulary", model["vocab_size"]),
    )
    for what, size in sizes:
        assert isinstance(size, int)
        if size % tensor_ranks:
            raise TrainerError(
                f"the model's {what} ({size}) does not divide by tensor_parallel={tensor_ranks}",
                hint="choose a tensor_parallel that divides it",
            )
