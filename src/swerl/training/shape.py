"""Shape of the trained model, and how many parameters follow from it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from swerl.errors import RecipeError, UnknownNameError, unknown
from swerl.recipe.schema import ModelSection


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with attention in every `full_attention_every`-th layer, and linear attention
    (gated delta rule) in the others."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    ffn_size: int = 0
    """Width of the feed-forward block; 0 in a model of experts only."""
    num_experts: int = 0
    """Experts a layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    """Width of the expert that every token passes."""
    full_attention_every: int = 1
    linear_key_size: int = 0
    """Key heads times their width, in linear attention."""
    linear_value_size: int = 0
    linear_num_key_heads: int = 0
    gated_attention: bool = False
    """Whether the query projection also makes a gate of the same size."""
    tied: bool = False
    """Whether input and output embeddings are one."""

    @property
    def num_attention_layers(self) -> int:
        """Layers with full attention."""
        return self.num_layers // self.full_attention_every

    @property
    def num_linear_layers(self) -> int:
        """Layers with linear attention."""
        return self.num_layers - self.num_attention_layers

    @property
    def embedding_params(self) -> int:
        """Parameters of input and output embeddings."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def dense_params(self) -> int:
        """Parameters of every layer that are not in routed experts; norms are left out."""
        return (
            self.num_attention_layers * self._attention_params
            + self.num_linear_layers * self._linear_params
            + self.num_layers * self._ffn_params
        )

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts."""
        return self.num_layers * self.num_experts * 3 * self.hidden_size * self.expert_ffn_size

    @property
    def params(self) -> int:
        """All parameters."""
        return self.embedding_params + self.dense_params + self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one token passes."""
        used = self.experts_per_token / self.num_experts if self.num_experts else 0
        return self.embedding_params + self.dense_params + round(used * self.expert_params)

    @property
    def _attention_params(self) -> int:
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        return self.hidden_size * ((3 if self.gated_attention else 2) * queries + 2 * keys)

    @property
    def _linear_params(self) -> int:
        return self.hidden_size * (2 * self.linear_key_size + 3 * self.linear_value_size)

    @property
    def _ffn_params(self) -> int:
        ffn = 0 if self.num_experts else self.ffn_size
        return self.hidden_size * (3 * (ffn + self.shared_ffn_size) + self.num_experts)


def shape_of(model: ModelSection) -> Shape:
    """Return the shape of the recipe's model: its folder's config, or a known name's.

    Raises RecipeError on a config that lacks something, UnknownNameError on an unknown name.
    """
    if model.path is None:
        made = model.shape
        return Shape(
            name=model.family,
            num_layers=made.num_layers,
            hidden_size=made.hidden_size,
            num_heads=made.num_heads,
            num_kv_heads=made.num_kv_heads,
            head_dim=made.head_dim,
            vocab_size=made.vocab_size,
            ffn_size=made.ffn_hidden_size,
        )
    file = model.path / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        return shape_from_config(str(model.path), config)
    return shape_from_config(model.path.name, _known(model.path.name))


def _known(name: str) -> Mapping[str, Any]:
    text = (files("swerl.training") / "shapes.toml").read_text(encoding="utf-8")
    shapes = tomllib.loads(text)
    if name.lower() not in shapes:
        error: UnknownNameError = unknown("model", name, shapes)
        error.hint += " Otherwise set model.path to a folder that has the model's config.json"
        raise error
    found: Mapping[str, Any] = shapes[name.lower()]
    return found


def shape_from_config(name: str, whole: Mapping[str, Any]) -> Shape:
    """Return the shape that a Hugging Face config describes. Raises RecipeError."""
    config: Mapping[str, Any] = whole.get("text_config", whole)
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
            num_experts=config.get("num_experts", 0),
            experts_per_token=config.get("num_experts_per_tok", 0),
            expert_ffn_size=config.get("moe_intermediate_size", 0),
            shared_ffn_size=config.get("shared_expert_intermediate_size", 0),
            full_attention_every=config.get("full_attention_interval", 1),
            linear_key_size=_product(config, "linear_num_key_heads", "linear_key_head_dim"),
            linear_value_size=_product(config, "linear_num_value_heads", "linear_value_head_dim"),
            linear_num_key_heads=config.get("linear_num_key_heads", 0),
            gated_attention=config.get("attn_output_gate", False),
            tied=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        message = f"the config of model {name} lacks {error}"
        raise RecipeError(message, hint="use the config.json that came with the model") from error


def _product(config: Mapping[str, Any], first: str, second: str) -> int:
    return int(config.get(first, 0)) * int(config.get(second, 0))
