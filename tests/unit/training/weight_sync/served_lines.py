"""Folders of small models of a trained line that SGLang serves, laid out as published ones are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from swerl.engines.families import tiny
from tests.unit.engines.families.lines import config_of, per_expert, weights_of

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""Model type -> what SGLang knows it by."""


def write_line(model: torch.nn.Module, folder: Path) -> Path:
    """Write a model of `tests.unit.engines.families.lines` with config, weights and tokenizer."""
    folder.mkdir(parents=True)
    tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    config, weights = config_of(model), weights_of(model)
    if str(config["model_type"]).startswith("qwen3_5"):
        config, weights = _within_a_vision_model(config, weights)
    else:
        weights = per_expert(weights)
    config |= {"architectures": [ARCHITECTURES[config["model_type"]]], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _within_a_vision_model(
    config: dict[str, Any], weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Nest the language model as Qwen3.5 is published, without the vision tower itself."""
    text = config | {"full_attention_interval": 4}
    model_type = str(text["model_type"]).removesuffix("_text")
    whole = {
        "model_type": model_type,
        "language_model_only": True,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"model_type": model_type, "depth": 1, "hidden_size": 32, "num_heads": 2},
    }
    nested = "model.language_model."
    return whole, {name.replace("model.", nested, 1): one for name, one in weights.items()}
