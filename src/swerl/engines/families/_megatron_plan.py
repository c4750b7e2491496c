"""Layers and sizes of a model, read from its config.json: one ModelPlan for every trained line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from swerl.core.chat import Json
from swerl.core.errors import InputError

HfConfig = Mapping[str, Json]


def text_config(whole: HfConfig) -> HfConfig:
    """Return the part about the language model; models with a vision tower nest it."""
    nested = whole.get("text_config")
    return nested if isinstance(nested, Mapping) else whole


def whole_number(config: HfConfig, key: str) -> int:
    """Return an integer. Raises InputError if it is missing."""
    value = config.get(key)
    if not isinstance(value, int):
        raise InputError(
            f"the model's config.json has no whole number {key!r}: {value!r}",
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


def rope_value(config: HfConfig, key: str, default: float) -> float:
    """Return a setting of the rotary embedding, nested in `rope_parameters` or not."""
    nested = config.get("rope_parameters")
    value = nested.get(key) if isinstance(nested, Mapping) else None
    return number(config.get(key, default) if value is None else value, key)


def refuse(config: HfConfig, odd: Mapping[str, bool]) -> None:
    """Raise an InputError that names the first key marked as odd."""
    for key, is_odd in odd.items():
        if is_odd:
            kind = config.get("model_type")
            raise InputError(
                f"a {kind} model with {key} = {config.get(key)!r} cannot be trained",
                hint=f"look at {key} in the model's config.json",
            )


def refuse_unusual(config: HfConfig) -> None:
    """Raise InputError on scaled rope, windows and other activations: no trained line has them."""
    nested = config.get("rope_parameters") or config.get("rope_scaling")
    kind = nested.get("rope_type", "default") if isinstance(nested, Mapping) else "default"
    if kind != "default":
        raise InputError(
            f"a model with rope_type {kind!r} cannot be trained",
            hint="look at rope_type in the model's config.json",
        )
    refuse(
        config,
        {
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
        },
    )


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
    rope_theta: float
    epsilon: float
    tied: bool
    prefix: str = "model."
    """Prefix of the names of the decoder's tensors."""
    rotary_share: float = 1.0
    """Fraction of a head that is rotated."""
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
    kind = str(config.get("model_type", hf_config.get("model_type", "")))
    read = _READERS.get(kind)
    if read is None:
        message = f"models of the type {kind!r} can be run but not trained"
        readers = ", ".join(sorted(name for name in _READERS if not name.endswith("_text")))
        raise InputError(message, hint=f"model_type must be one of: {readers}")
    refuse_unusual(config)
    plan = read(config)
    nested = config is not hf_config
    tied = bool(hf_config.get("tie_word_embeddings", False)) if nested else plan.tied
    return replace(plan, tied=tied, prefix="model.language_model." if nested else "model.")


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
    plan = _base(config)
    return replace(
        plan,
        attention=replace(plan.attention, gated=bool(config.get("attn_output_gate", True))),
        rotary_share=rope_value(config, "partial_rotary_factor", 0.25),
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
    plan = _base(config)
    experts = _experts(config)
    experts = replace(
        experts,
        shared_width=whole_number(config, "n_shared_experts") * experts.width,
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
        rotary_share=rope_value(config, "partial_rotary_factor", 0.5),
        experts=experts,
        dense_layers=frozenset(range(whole_number(config, "first_k_dense_replace"))),
    )


_READERS: Mapping[str, Callable[[HfConfig], ModelPlan]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "glm4_moe": _glm4_moe,
}
"""`model_type` in config.json -> reader of the rest."""

_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys for the number of experts; transformers renames the key when it writes a config."""


def _base(config: HfConfig) -> ModelPlan:
    num_heads = whole_number(config, "num_attention_heads")
    hidden_size = whole_number(config, "hidden_size")
    head_dim: Json = config.get("head_dim") or hidden_size // num_heads
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
            num_groups=whole_number(config, "num_key_value_heads"),
            head_dim=int(number(head_dim, "head_dim")),
        ),
        rope_theta=rope_value(config, "rope_theta", 10000.0),
        epsilon=number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _experts(config: HfConfig) -> ExpertsPlan:
    return ExpertsPlan(
        num=whole_number(config, next((key for key in _COUNTS if key in config), _COUNTS[0])),
        per_token=whole_number(config, "num_experts_per_tok"),
        width=whole_number(config, "moe_intermediate_size"),
    )


def megatron_settings(plan: ModelPlan) -> dict[str, Json]:
    """Return `transformer`, `model`, `layers` and `router`; see ModelMapping.config."""
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
            "rotary_base": int(plan.rope_theta),
            "rotary_percent": plan.rotary_share,
            "share_embeddings_and_output_weights": plan.tied,
        },
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
