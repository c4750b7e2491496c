"""Which parts the layers are built of, and which sizes of them the ranks can share."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from swerl.chat import Json
from swerl.errors import TrainerError
from swerl.training.attention import PackedAttention
from swerl.training.norms import RMSNorm


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the layers that this rank's pipeline stage builds."""
    layer: ModuleSpec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def check_divides(
    transformer: Mapping[str, Json], model: Mapping[str, Json], tensor_ranks: int
) -> None:
    """Raise TrainerError where the model does not divide over the tensor-parallel ranks."""
    sizes: Sequence[tuple[str, Json]] = (
        ("attention heads", transformer["num_attention_heads"]),
        ("query groups", transformer["num_query_groups"]),
        ("feed-forward width", transformer["ffn_hidden_size"]),
        ("vocabulary", model["vocab_size"]),
    )
    for what, size in sizes:
        assert isinstance(size, int)
        if size % tensor_ranks:
            message = (
                f"the model's {what} ({size}) does not divide by tensor_parallel={tensor_ranks}"
            )
            raise TrainerError(message, hint="choose a tensor_parallel that divides it")
