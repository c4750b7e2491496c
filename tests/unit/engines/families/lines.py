"""Small models of every trained line, as transformers builds them, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from swerl.engines.families import tiny

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    # A delta net's output is normalised, also where query and key are all but at right angles and
    # nothing is left but rounding: a wide epsilon keeps that from being all that is compared.
    "rms_norm_eps": 1e-2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE, "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", **BASE, "sliding_window": None, "head_dim": 24},
    "qwen2": {"model_type": "qwen2", **BASE, "rope_parameters": YARN, "head_dim": 8},
    "smollm2": {"model_type": "llama", **BASE, "tie_word_embeddings": True}
    | {"hidden_size": 48, "head_dim": 12, "intermediate_size": 64},
    "qwen3": {"model_type": "qwen3", **BASE},
    "qwen3_tied": {"model_type": "qwen3", **BASE, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **BASE, **EXPERTS, "num_experts": 4}
    | {"norm_topk_prob": True},
    "qwen3_5": {"model_type": "qwen3_5_text", **BASE, **DELTA},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **BASE, **DELTA, **EXPERTS}
    | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "glm4_moe": {"model_type": "glm4_moe", **BASE, **EXPERTS}
    | {
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_air": {"model_type": "glm4_moe", **BASE, **EXPERTS}
    | {
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "attention_bias": False,
    },
}
"""Name -> the settings of a config.json."""


def build(line: str, **changes: Any) -> torch.nn.Module:
    """Build a line's small model in fp32, every weight drawn at random; `changes` of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = LINES[line] | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, value in _weights(model).items():
            noise = torch.randn_like(value)
            value.copy_(value + 0.2 * noise if value.ndim == 1 else 0.1 * noise)
            if name.endswith("A_log"):
                value.copy_(torch.rand_like(value))
    return model


def write_model(model: torch.nn.Module, folder: Path) -> None:
    """Write a model as published checkpoints are, with a tokenizer of bytes."""
    folder.mkdir(parents=True)
    tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(config_of(model), default=str))
    save_file(weights_of(model), folder / "model.safetensors", metadata={"format": "pt"})


def config_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return what the model's config.json would say."""
    config: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr, operator]
    return config


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's tensors by name, without the second name of tied ones."""
    return {name: value.detach().clone() for name, value in _weights(model).items()}


def per_expert(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as published checkpoints of Qwen3 and GLM name them: expert by expert."""
    out: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(value):
                for part, half in zip(("gate", "up"), expert.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", f"{number}.{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            for number, expert in enumerate(value):
                out[name.replace("down_proj", f"{number}.down_proj.weight")] = expert
        else:
            out[name] = value
    return out


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters())
    return found | {
        name: value for name, value in model.named_buffers() if name.endswith("correction_bias")
    }
