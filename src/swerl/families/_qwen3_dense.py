"""How the weights of dense Qwen3 models correspond to Megatron-Core's local-spec parameters.

Megatron keeps Q, K and V in one matrix whose rows are grouped by query group: each group holds
its query heads, then its key head, then its value head. The gate and up projections are stacked.
Everything else is a change of name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swerl.chat import Json
from swerl.errors import InputError

if TYPE_CHECKING:
    import torch

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV = "self_attention.linear_qkv.weight"
_FC1 = "mlp.linear_fc1.weight"
_QKV_PARTS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_FC1_PARTS = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


class Qwen3DenseMapping:
    """Implements MegatronMapping for Qwen3ForCausalLM.

    A layer's number in a parameter name is the number in the whole model, also under pipeline
    parallelism.
    """

    def config(self, hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return `transformer`: keyword arguments of TransformerConfig, `model`: of GPTModel.

        The caller adds what is no plain value (`activation_func` is SiLU) or no property of the
        model: dtypes, parallel sizes, `max_sequence_length`, the layer spec. Raises InputError
        on a model that this mapping does not cover.
        """
        _check(hf_config)
        shape = _shape(hf_config)
        transformer: dict[str, Json] = {
            "num_layers": _int(hf_config, "num_hidden_layers"),
            "hidden_size": _int(hf_config, "hidden_size"),
            "ffn_hidden_size": _int(hf_config, "intermediate_size"),
            "num_attention_heads": shape.num_heads,
            "num_query_groups": shape.num_groups,
            "kv_channels": shape.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": _float(hf_config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
        model: dict[str, Json] = {
            "vocab_size": _int(hf_config, "vocab_size"),
            "position_embedding_type": "rope",
            "rotary_base": _rope_theta(hf_config),
            "share_embeddings_and_output_weights": _tied(hf_config),
        }
        return {"transformer": transformer, "model": model}

    def to_megatron(
        self, name: str, hf: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> torch.Tensor:
        """Return the full (unsharded) tensor of one Megatron parameter.

        Raises InputError on a parameter or a Hugging Face tensor that is not there.
        """
        if name == OUTPUT and _tied(hf_config):
            return _get(hf, _TOP[EMBEDDING])
        if name in _TOP:
            return _get(hf, _TOP[name])
        layer, rest = _split(name)
        prefix = f"model.layers.{layer}."
        if rest == _QKV:
            q, k, v = (_get(hf, prefix + part) for part in _QKV_PARTS)
            return _join_qkv(q, k, v, _shape(hf_config))
        if rest == _FC1:
            import torch

            return torch.cat([_get(hf, prefix + part) for part in _FC1_PARTS])
        if rest not in _LAYER:
            raise _unknown(name)
        return _get(hf, prefix + _LAYER[rest])

    def to_hf(
        self, full: Mapping[str, torch.Tensor], hf_config: Mapping[str, Json]
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of full Megatron parameters.

        With tied embeddings the output layer is left out, as Hugging Face's own files do.
        """
        out: dict[str, torch.Tensor] = {}
        for name, tensor in full.items():
            if name == OUTPUT and _tied(hf_config):
                continue
            if name in _TOP:
                out[_TOP[name]] = tensor
            else:
                out |= _layer_to_hf(name, tensor, hf_config)
        return out


@dataclass(frozen=True, slots=True)
class _Shape:
    num_heads: int
    num_groups: int
    head_dim: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V within one query group."""
        return (self.num_heads // self.num_groups * self.head_dim, self.head_dim, self.head_dim)


def _layer_to_hf(
    name: str, tensor: torch.Tensor, hf_config: Mapping[str, Json]
) -> dict[str, torch.Tensor]:
    layer, rest = _split(name)
    prefix = f"model.layers.{layer}."
    if rest == _QKV:
        parts = _split_qkv(tensor, _shape(hf_config))
        return {prefix + part: piece for part, piece in zip(_QKV_PARTS, parts, strict=True)}
    if rest == _FC1:
        halves = tensor.chunk(2)
        return {
            prefix + part: half.contiguous() for part, half in zip(_FC1_PARTS, halves, strict=True)
        }
    if rest not in _LAYER:
        raise _unknown(name)
    return {prefix + _LAYER[rest]: tensor}


def _join_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: _Shape) -> torch.Tensor:
    import torch

    hidden = q.shape[-1]
    grouped = [
        part.reshape(shape.num_groups, rows, hidden)
        for part, rows in zip((q, k, v), shape.rows, strict=True)
    ]
    return torch.cat(grouped, dim=1).reshape(-1, hidden)


def _split_qkv(qkv: torch.Tensor, shape: _Shape) -> list[torch.Tensor]:
    hidden = qkv.shape[-1]
    grouped = qkv.reshape(shape.num_groups, -1, hidden)
    q_end = shape.rows[0]
    k_end = q_end + shape.rows[1]
    parts = (grouped[:, :q_end], grouped[:, q_end:k_end], grouped[:, k_end:])
    return [part.reshape(-1, hidden).contiguous() for part in parts]


def _split(name: str) -> tuple[int, str]:
    head, _, tail = name.removeprefix("decoder.layers.").partition(".")
    if not name.startswith("decoder.layers.") or not head.isdecimal():
        raise _unknown(name)
    return int(head), tail


def _shape(hf_config: Mapping[str, Json]) -> _Shape:
    num_heads = _int(hf_config, "num_attention_heads")
    num_groups = _int(hf_config, "num_key_value_heads")
    head_dim = hf_config.get("head_dim") or _int(hf_config, "hidden_size") // num_heads
    return _Shape(num_heads, num_groups, int(_float(head_dim, "head_dim")))


def _rope_theta(hf_config: Mapping[str, Json]) -> int:
    nested = hf_config.get("rope_parameters")
    found = nested.get("rope_theta") if isinstance(nested, dict) else None
    return int(_float(found or hf_config.get("rope_theta", 10000.0), "rope_theta"))


def _tied(hf_config: Mapping[str, Json]) -> bool:
    return bool(hf_config.get("tie_word_embeddings", False))


def _check(hf_config: Mapping[str, Json]) -> None:
    nested = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    rope_type = nested.get("rope_type", "default") if isinstance(nested, dict) else "default"
    refused = {
        "rope_type": rope_type != "default",
        "attention_bias": bool(hf_config.get("attention_bias")),
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
    }
    for key, is_refused in refused.items():
        if is_refused:
            message = f"a dense Qwen3 model with an unusual {key} cannot be trained"
            raise InputError(message, hint=f"look at {key} in the model's config.json")


def _get(hf: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    try:
        return hf[name]
    except KeyError:
        message = f"the model's weights lack {name!r}"
        raise InputError(message, hint="is the model folder a complete dense Qwen3?") from None


def _unknown(name: str) -> InputError:
    message = f"Megatron parameter {name!r} has no counterpart in a dense Qwen3 model"
    return InputError(message, hint="pick the model's own family in the recipe")


def _int(hf_config: Mapping[str, Json], key: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int):
        message = f"the model's config.json has no whole number {key!r}: {value!r}"
        raise InputError(message, hint="is it the config of a dense Qwen3 model?")
    return value


def _float(value: Json, key: str) -> float:
    if not isinstance(value, int | float):
        message = f"{key!r} in the model's config.json must be a number, not {value!r}"
        raise InputError(message, hint="is it the config of a dense Qwen3 model?")
    return float(value)
