"""Layers and sizes of a model, read from its config.json: one ModelPlan for every trained line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from swerl.core.chat import Json
from swerl.core.errors import InputError

if TYPE_CHECKING:
    import torch

HfConfig = Mapping[str, Json]


def text_config(whole: HfConfig) -> HfConfig:
    """Return the part about the language model; models with a vision tower nest it."""
    nested = whole.get("text_config")
    return nested if isinstance(nested, Mapping) else whole


def whole_number(config: HfConfig, key: str, *, least: int = 1) -> int:
    """Return an integer. Raises InputError if it is missing or below `least`."""
    value = config.get(key)
    if type(value) is not int or value < least:
        raise InputError(
            f"the model's config.json has no whole number {key!r} of {least} or more: {value!r}",
            hint="use the config.json that came with the model",
        )
    return value


def number(value: Json, key: str) -> float:
    """Return a number as float. Raises InputError on anything else."""
    if not isinstance(value, int | float):
        raise InputError(
            f"{key!r} in the model's config.json must be a number, not {value!r}",
            hint="use the config.json that came with the model",
        )
    return float(value)


def refuse(config: HfConfig, odd: Mapping[str, bool]) -> None:
    """Raise an InputError that names the first key marked as odd."""
    for key, is_odd in odd.items():
        if is_odd:
            kind = config.get("model_type")
            raise InputError(
                f"a {kind} model with {key} = {config.get(key)!r} is not supported",
                hint=f"look at {key} in the model's config.json",
            )


def refuse_unusual(config: HfConfig) -> None:
    """Raise InputError on sliding windows and other activations: no trained line has them."""
    layers = config.get("layer_types") or []
    assert isinstance(layers, list)
    refuse(
        config,
        {
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "layer_types": not {"full_attention", "linear_attention"}.issuperset(layers),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
        },
    )


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary embedding (arXiv 2104.09864) and its scaling for longer contexts.

    A scaling keeps fast frequencies, divides slow ones by `factor`, and blends those between.
    """

    theta: float
    dim: int
    """Values of a head that are rotated, its first ones."""
    kind: str = "default"
    """default, linear, llama3 or yarn (arXiv 2309.00071)."""
    factor: float = 1.0
    num_positions: float = 0.0
    """Context length before the scaling."""
    slow: float = 0.0
    """A frequency with fewer turns over `num_positions` is divided by `factor`."""
    fast: float = 0.0
    """A frequency with more turns is kept."""
    truncated: bool = True
    """True if yarn rounds the bounds of its blend to whole frequencies."""
    attention: float = 1.0
    """Factor of rotated queries and keys."""

    def frequencies(self) -> torch.Tensor:
        """Return the angle of each pair of values at position 1: [dim / 2], fp32."""
        import torch

        index = torch.arange(self.dim // 2, dtype=torch.int64).float()
        frequencies = 1.0 / self.theta ** (2 * index / self.dim)
        if self.kind == "default":
            return frequencies
        divided = frequencies / self.factor
        if self.kind == "linear":
            return divided
        if self.kind == "llama3":
            turns = self.num_positions / (2 * math.pi / frequencies)
            kept = (turns - self.slow) / (self.fast - self.slow)
        else:
            first, last = self._pair(self.fast), self._pair(self.slow)
            if self.truncated:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0.0), min(last, self.dim - 1.0)
            kept = 1 - (index - first) / ((last - first) or 0.001)
        kept = kept.clamp(0, 1)
        return (1 - kept) * divided + kept * frequencies

    def _pair(self, turns: float) -> float:
        """Return the index of the pair with so many turns over `num_positions`."""
        wavelength = self.num_positions / (2 * math.pi * turns)
        return self.dim * math.log(wavelength) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Full attention with grouped queries."""

    num_heads: int
    num_groups: int
    head_dim: int
    gated: bool = False
    """True if each query head has a gate of its width; its sigmoid weighs the output."""
    bias: bool = False
    """True if the projections to queries, keys and values have a bias."""
    normed: bool = True
    """True if queries and keys are normalised by head."""


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """A gated delta net."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Positions of the convolution, the current one included."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """A feed-forward block of routed experts."""

    num: int
    per_token: int
    width: int
    shared_width: int = 0
    shared_name: str = "shared_expert"
    shared_gate: bool = False
    sigmoid: bool = False
    """True for sigmoid scores, False for a softmax over all experts."""
    normalised: bool = True
    """True if the chosen experts' scores are divided by their sum."""
    scale: float = 1.0
    bias: bool = False
    """True if a correction bias is added to the scores that choose experts, not to the weights."""
    stacked: bool = False
    """True if published checkpoints store a layer's experts as two stacked tensors."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A decoder's parts and sizes."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    ffn_size: int
    attention: AttentionPlan
    rope: RopePlan
    epsilon: float
    tied: bool
    prefix: str = "model."
    """Prefix of the names of the decoder's tensors."""
    norm_adds_one: bool = False
    """True if norms multiply by one plus their weight."""
    delta: DeltaPlan | None = None
    linear_layers: frozenset[int] = frozenset()
    """Layers, counted from 0, that have a gated delta net for attention."""
    experts: ExpertsPlan | None = None
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts in a model of experts."""

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, counted from 0, has routed experts."""
        return self.experts is not None and layer not in self.dense_layers


def plan_of(hf_config: HfConfig) -> ModelPlan:
    """Return the plan of a model. Raises InputError on one that cannot be trained."""
    config = text_config(hf_config)
    kind = str(hf_config.get("model_type", config.get("model_type", "")))
    read = _READERS.get(kind)
    if read is None:
        message = f"models of the type {kind!r} can be run but not trained"
        readers = ", ".join(sorted(name for name in _READERS if not name.endswith("_text")))
        raise InputError(message, hint=f"model_type must be one of: {readers}")
    refuse_unusual(config)
    if hf_config.get("quantization_config") or config.get("quantization_config"):
        hint = "name the model in bf16; its name is usually the one without FP8, AWQ or GPTQ"
        raise InputError("the model's weights are quantised, so they cannot be trained", hint=hint)
    plan = read(config)
    nested = config is not hf_config
    tied = bool(hf_config.get("tie_word_embeddings", False)) if nested else plan.tied
    return replace(plan, tied=tied, prefix="model.language_model." if nested else "model.")


def _llama(config: HfConfig) -> ModelPlan:
    # Its `attention_bias` is one of the output projection as well; Megatron-Core has no such layer.
    refuse(config, {key: bool(config.get(key)) for key in ("attention_bias", "mlp_bias")})
    plan = _base(config)
    return replace(plan, attention=replace(plan.attention, normed=False))


def _mistral(config: HfConfig) -> ModelPlan:
    # Without the key, transformers takes 4096. A window as long as the context cuts nothing.
    window = number(config.get("sliding_window", 4096) or 0, "sliding_window")
    context = whole_number(config, "max_position_embeddings")
    refuse({"sliding_window": window, **config}, {"sliding_window": 0 < window < context})
    return _llama(config)


def _qwen2(config: HfConfig) -> ModelPlan:
    plan = _llama(config)
    return replace(plan, attention=replace(plan.attention, bias=True))


def _qwen3(config: HfConfig) -> ModelPlan:
    refuse(config, {"attention_bias": bool(config.get("attention_bias"))})
    return _base(config)


def _qwen3_moe(config: HfConfig) -> ModelPlan:
    refuse(config, {"decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1})
    listed = config.get("mlp_only_layers") or []
    assert isinstance(listed, list)
    experts = replace(_experts(config), normalised=bool(config.get("norm_topk_prob")))
    dense = frozenset(layer for layer in listed if isinstance(layer, int))
    return replace(_qwen3(config), experts=experts, dense_layers=dense)


def _qwen3_5(config: HfConfig) -> ModelPlan:
    refuse(config, {"attention_bias": bool(config.get("attention_bias"))})
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        interval = int(number(config.get("full_attention_interval", 4), "full_attention_interval"))
        layers = range(1, whole_number(config, "num_hidden_layers") + 1)
        kinds = ["linear_attention" if n % interval else "full_attention" for n in layers]
    plan = _base(config, rotated=0.25)
    return replace(
        plan,
        attention=replace(plan.attention, gated=bool(config.get("attn_output_gate", True))),
        norm_adds_one=True,
        linear_layers=frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
        delta=DeltaPlan(
            num_key_heads=whole_number(config, "linear_num_key_heads"),
            num_value_heads=whole_number(config, "linear_num_value_heads"),
            key_dim=whole_number(config, "linear_key_head_dim"),
            value_dim=whole_number(config, "linear_value_head_dim"),
            kernel=whole_number(config, "linear_conv_kernel_dim"),
        ),
    )


def _qwen3_5_moe(config: HfConfig) -> ModelPlan:
    experts = replace(
        _experts(config),
        shared_width=whole_number(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        stacked=True,
    )
    return replace(_qwen3_5(config), experts=experts)


def _glm4_moe(config: HfConfig) -> ModelPlan:
    refuse(
        config,
        {"n_group": config.get("n_group", 1) != 1, "topk_group": config.get("topk_group", 1) != 1},
    )
    plan = _base(config, rotated=0.5)
    experts = _experts(config)
    experts = replace(
        experts,
        shared_width=whole_number(config, "n_shared_experts", least=0) * experts.width,
        shared_name="shared_experts",
        sigmoid=True,
        normalised=bool(config.get("norm_topk_prob", True)),
        scale=number(config.get("routed_scaling_factor", 1.0), "routed_scaling_factor"),
        bias=True,
    )
    attention = replace(
        plan.attention,
        bias=bool(config.get("attention_bias", False)),
        normed=bool(config.get("use_qk_norm", False)),
    )
    return replace(
        plan,
        attention=attention,
        experts=experts,
        dense_layers=frozenset(range(whole_number(config, "first_k_dense_replace", least=0))),
    )


_READERS: Mapping[str, Callable[[HfConfig], ModelPlan]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "glm4_moe": _glm4_moe,
}
"""`model_type` in config.json -> reader of the rest."""

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys for the number of experts; transformers renames the key when it writes a config."""


def _base(config: HfConfig, *, rotated: float = 1.0) -> ModelPlan:
    """Return the parts that all lines have; `rotated` is the usual fraction of a head."""
    num_heads = whole_number(config, "num_attention_heads")
    hidden_size = whole_number(config, "hidden_size")
    head_dim = int(number(config.get("head_dim") or hidden_size // num_heads, "head_dim"))
    needs_width = "moe_intermediate_size" not in config or "intermediate_size" in config
    return ModelPlan(
        num_layers=whole_number(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        vocab_size=whole_number(config, "vocab_size"),
        ffn_size=whole_number(
            config, "intermediate_size" if needs_width else "moe_intermediate_size"
        ),
        attention=AttentionPlan(
            num_heads=num_heads,
            num_groups=num_heads
            if config.get("num_key_value_heads") is None
            else whole_number(config, "num_key_value_heads"),
            head_dim=head_dim,
        ),
        rope=_rope(config, head_dim, rotated),
        epsilon=number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _rope(config: HfConfig, head_dim: int, rotated: float) -> RopePlan:
    """Read the rotary embedding; older configs have some keys beside `rope_scaling`, not in it."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(nested, Mapping)
    values = {**config, **nested}

    def value(key: str, default: float | None = None) -> float:
        stated = values.get(key)
        return number(default if stated is None else stated, key)

    rope = RopePlan(
        theta=value("rope_theta", 10000.0),
        dim=int(head_dim * value("partial_rotary_factor", rotated)),
        kind=str(nested.get("rope_type") or nested.get("type") or "default"),
    )
    refuse({**config, "rope_type": rope.kind}, {"rope_type": rope.kind not in _ROPE_KINDS})
    if rope.kind == "default":
        return rope
    rope = replace(rope, factor=value("factor"))
    if rope.kind == "linear":
        return rope
    key = "original_max_position_embeddings"
    context = config.get(key) or nested.get(key) or config.get("max_position_embeddings")
    rope = replace(rope, num_positions=number(context, key))
    if rope.kind == "llama3":
        return replace(rope, slow=value("low_freq_factor"), fast=value("high_freq_factor"))
    # A part of a head would need the factor, the rest not: attention has one scale for both.
    refuse(values, {"partial_rotary_factor": rope.dim != head_dim})
    attention = _yarn_scale(rope.factor, 1.0)
    if nested.get("mscale") and nested.get("mscale_all_dim"):
        attention = _yarn_scale(rope.factor, value("mscale"))
        attention /= _yarn_scale(rope.factor, value("mscale_all_dim"))
    return replace(
        rope,
        slow=value("beta_slow", 1.0),
        fast=value("beta_fast", 32.0),
        truncated=bool(nested.get("truncate", True)),
        attention=value("attention_factor", attention),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _experts(config: HfConfig) -> ExpertsPlan:
    return ExpertsPlan(
        num=whole_number(config, next((key for key in _COUNTS if key in config), _COUNTS[0])),
        per_token=whole_number(config, "num_experts_per_tok"),
        width=whole_number(config, "moe_intermediate_size"),
    )


def megatron_settings(plan: ModelPlan) -> dict[str, Json]:
    """Return `transformer`, `model`, `rope`, `layers` and `router`; see ModelMapping.config."""
    router: dict[str, Json] = {}
    if experts := plan.experts:
        router["sigmoid"] = experts.sigmoid
        router["normalised"] = experts.normalised
        router["scale"] = experts.scale
        router["bias"] = experts.bias
    layers: list[Json] = [
        {
            "attention": "gated_delta" if layer in plan.linear_layers else "full",
            "experts": plan.has_experts(layer),
        }
        for layer in range(plan.num_layers)
    ]
    return {
        "transformer": _transformer(plan),
        "model": {
            "vocab_size": plan.vocab_size,
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": plan.tied,
        },
        "rope": asdict(plan.rope),
        "layers": layers,
        "router": router,
    }


def _transformer(plan: ModelPlan) -> dict[str, Json]:
    attention = plan.attention
    settings: dict[str, Json] = {
        "num_layers": plan.num_layers,
        "hidden_size": plan.hidden_size,
        "ffn_hidden_size": plan.ffn_size,
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_groups,
        "kv_channels": attention.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": plan.epsilon,
        "layernorm_zero_centered_gamma": plan.norm_adds_one,
        "qk_layernorm": attention.normed,
        "add_qkv_bias": attention.bias,
        "attention_output_gate": attention.gated,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if plan.rope.attention != 1.0:
        settings["softmax_scale"] = plan.rope.attention**2 * attention.head_dim**-0.5
    if plan.delta:
        settings |= {
            "linear_conv_kernel_dim": plan.delta.kernel,
            "linear_key_head_dim": plan.delta.key_dim,
            "linear_value_head_dim": plan.delta.value_dim,
            "linear_num_key_heads": plan.delta.num_key_heads,
            "linear_num_value_heads": plan.delta.num_value_heads,
        }
    if experts := plan.experts:
        settings |= {
            "num_moe_experts": experts.num,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.width,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
        }
        if experts.shared_width:
            settings["moe_shared_expert_intermediate_size"] = experts.shared_width
            settings["moe_shared_expert_gate"] = experts.shared_gate
    return settings
