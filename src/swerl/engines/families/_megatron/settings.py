"""A model's plan as the settings that Megatron-Core takes."""

from __future__ import annotations

from swerl.core.chat import Json
from swerl.engines.families._megatron.plan import Experts, Plan


def megatron_settings(plan: Plan) -> dict[str, Json]:
    """Return `transformer`, `model`, `layers` and `router`, as ModelMapping.config says."""
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
        "router": _router(plan.experts) if plan.experts else {},
    }


def _transformer(plan: Plan) -> dict[str, Json]:
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
    if plan.experts:
        settings |= _experts(plan.experts)
    return settings


def _experts(experts: Experts) -> dict[str, Json]:
    settings: dict[str, Json] = {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.width,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }
    if experts.shared_width:
        settings["moe_shared_expert_intermediate_size"] = experts.shared_width
        settings["moe_shared_expert_gate"] = experts.shared_gate
    return settings


def _router(experts: Experts) -> dict[str, Json]:
    return {
        "sigmoid": experts.sigmoid,
        "normalised": experts.normalised,
        "scale": experts.scale,
        "bias": experts.bias,
    }
