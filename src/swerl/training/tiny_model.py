"""Makes a small dense Qwen3 in Hugging Face format from a shape and a seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.errors import InputError
from swerl.recipe.schema import ModelShape

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Files that travel with the weights wherever they go."""


def make_tiny_model(
    folder: Path, shape: ModelShape, *, seed: int, tokenizer: Path, eos_id: int
) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; return `folder`.

    The same shape and seed give the same bytes. Matrices are drawn from a normal
    distribution, norms are 1. Raises InputError where `tokenizer` has no tokenizer.json.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        raise InputError(
            f"no tokenizer.json in {tokenizer}", hint="give the folder of a trained tokenizer"
        )
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    config = json.dumps(_config(shape, eos_id), indent=2, sort_keys=True)
    (folder / "config.json").write_text(config + "\n")
    from safetensors.torch import save_file

    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files that travel with the weights, where they exist."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source != target:
            shutil.copyfile(source / name, target / name)


def _config(shape: ModelShape, eos_id: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": shape.init_std,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def _weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size)
        if len(size) == 1
        else torch.empty(size).normal_(0.0, shape.init_std, generator=generator)
        for name, size in _sizes(shape)
    }


def _sizes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = shape.hidden_size, shape.ffn_hidden_size
    query, group = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (query, hidden)
        yield prefix + "self_attn.k_proj.weight", (group, hidden)
        yield prefix + "self_attn.v_proj.weight", (group, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        yield prefix + "self_attn.q_norm.weight", (shape.head_dim,)
        yield prefix + "self_attn.k_norm.weight", (shape.head_dim,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (wide, hidden)
        yield prefix + "mlp.up_proj.weight", (wide, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
