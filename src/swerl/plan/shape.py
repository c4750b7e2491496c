"""The shape of the trained model, from its config or from the table of known models."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from swerl.core.errors import RecipeError, UnknownNameError, unknown
from swerl.engines.families.tiny import TinyShape
from swerl.recipe.schema import ModelSection
from swerl.recipe.sections import INITIAL_MODEL


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with full attention in every `full_attention_every`-th layer, and linear attention
    (gated delta rule) in the others."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    ffn_size: int = 0
    """Width of the feed-forward block in layers without experts."""
    num_dense_layers: int = 0
    """Leading layers without experts in a mixture-of-experts model."""
    num_experts: int = 0
    """Experts per layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    """Total width of the experts that every token uses."""
    shared_gate: bool = False
    """True if a gate weighs the shared expert's output."""
    full_attention_every: int = 1
    linear_key_size: int = 0
    """Key heads times their width, in linear attention."""
    linear_value_size: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_conv_size: int = 4
    """Kernel size of linear attention's convolution."""
    qk_norm: bool = True
    """True if queries and keys are normalised per head."""
    qkv_bias: bool = False
    gated_attention: bool = False
    """True if the query projection also computes a gate of the same size."""
    tied: bool = False
    """True if input and output embeddings are one matrix."""
    has_vision: bool = False
    """True if the model also reads images; its vision tower is neither trained nor counted."""

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers // self.full_attention_every

    @property
    def num_linear_layers(self) -> int:
        return self.num_layers - self.num_attention_layers

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has full attention."""
        return (layer + 1) % self.full_attention_every == 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has routed experts."""
        return bool(self.num_experts) and layer >= self.num_dense_layers


def shape_of(model: ModelSection) -> Shape:
    """Return the shape of the recipe's model, from its folder's config or by its name.

    Raises RecipeError on an incomplete config, UnknownNameError on an unknown name.
    """
    if model.path is None or (model.path.name == INITIAL_MODEL and not model.path.exists()):
        # The twin's, which a run without a model path makes.
        sizes = TinyShape()
        return Shape(
            name=model.family,
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            ffn_size=sizes.ffn_hidden_size,
            tied=True,
        )
    file = model.path / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        return shape_from_config(str(model.path), config)
    name = model.path.name.partition("@")[0]
    return shape_from_config(name, _known(name))


def _known(name: str) -> Mapping[str, Any]:
    text = (files("swerl.plan") / "shapes.toml").read_text(encoding="utf-8")
    shapes = tomllib.loads(text)
    if name.lower() not in shapes:
        error: UnknownNameError = unknown("model", name, shapes)
        error.hint += " Otherwise set model.path to a folder that has the model's config.json"
        raise error
    shape: Mapping[str, Any] = shapes[name.lower()]
    return shape


_UNNORMED = ("glm", "llama", "mistral", "qwen2")
"""Starts of the model types whose queries and keys have no norm."""


def shape_from_config(name: str, whole: Mapping[str, Any]) -> Shape:
    """Return the shape that a Hugging Face config describes. Raises RecipeError."""
    config: Mapping[str, Any] = whole.get("text_config", whole)
    line = str(config.get("model_type", ""))
    try:
        heads = config["num_attention_heads"]
        return Shape(
            name=name,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            ffn_size=config.get("intermediate_size", 0),
            num_dense_layers=config.get("first_k_dense_replace", 0),
            num_experts=_num_experts(config),
            experts_per_token=config.get("num_experts_per_tok", 0),
            expert_ffn_size=config.get("moe_intermediate_size", 0),
            shared_ffn_size=_shared_width(config),
            shared_gate="shared_expert_intermediate_size" in config,
            full_attention_every=_attention_interval(config),
            linear_key_size=_product(config, "linear_num_key_heads", "linear_key_head_dim"),
            linear_value_size=_product(config, "linear_num_value_heads", "linear_value_head_dim"),
            linear_num_key_heads=config.get("linear_num_key_heads", 0),
            linear_num_value_heads=config.get("linear_num_value_heads", 0),
            linear_conv_size=config.get("linear_conv_kernel_dim", 4),
            qk_norm=config.get("use_qk_norm", not line.startswith(_UNNORMED)),
            qkv_bias=config.get("attention_bias", line == "qwen2"),
            gated_attention=config.get(
                "attn_output_gate", bool(config.get("linear_num_key_heads"))
            ),
            tied=config.get("tie_word_embeddings", False),
            has_vision="vision_config" in whole,
        )
    except KeyError as error:
        raise RecipeError(
            f"the config of model {name} lacks {error}",
            hint="use the config.json that came with the model",
        ) from error


def _product(config: Mapping[str, Any], first: str, second: str) -> int:
    return int(config.get(first, 0)) * int(config.get(second, 0))


def _num_experts(config: Mapping[str, Any]) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(config[name]) for name in names if name in config), 0)


def _shared_width(config: Mapping[str, Any]) -> int:
    count = config.get("n_shared_experts", 0) * config.get("moe_intermediate_size", 0)
    return int(config.get("shared_expert_intermediate_size", count))


def _attention_interval(config: Mapping[str, Any]) -> int:
    """Return the distance of full-attention layers, which the config may list one by one."""
    kinds = config.get("layer_types") or []
    if "linear_attention" not in kinds:
        return int(config.get("full_attention_interval", 1))
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    regular = [
        "linear_attention" if number % interval else "full_attention"
        for number in range(1, len(kinds) + 1)
    ]
    if kinds != regular:
        raise RecipeError(
            "layer_types has full attention at unequal distances",
            hint="only hybrids like Qwen3.5 and Qwen3.6 are supported",
        )
    return int(interval)
