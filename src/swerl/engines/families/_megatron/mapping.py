"""Moves weights between Hugging Face's names and Megatron-Core's, for every trained model line.

Which line it is says `model_type` in the model's config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from swerl.core.chat import Json
from swerl.core.errors import InputError
from swerl.engines.families._megatron.entries import Entry, same
from swerl.engines.families._megatron.layers import layer_entries
from swerl.engines.families._megatron.plan import Plan, plan_of
from swerl.engines.families._megatron.reading import HfConfig
from swerl.engines.families._megatron.settings import megatron_settings

if TYPE_CHECKING:
    import torch

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_UNTRAINED = re.compile(r"(model\.visual|visual|mtp|model\.mtp)\.")
_HF_LAYER = re.compile(r"layers\.(\d+)\.")


class ModelMapping:
    """Implements MegatronMapping.

    A layer's number in a parameter's name is the number in the whole model, also under pipeline
    parallelism; experts are stacked in the order of their numbers.
    """

    def config(self, hf_config: HfConfig) -> Mapping[str, Json]:
        """Return the keyword arguments of Megatron's configuration, and what layers are built of.

        `transformer` belongs to TransformerConfig, `model` to GPTModel; `layers` has one object a
        layer (`attention`: full or gated_delta, `experts`: whether it has routed ones); `router`
        says how experts are chosen. The caller adds what is no plain value (`activation_func` is
        SiLU) or no property of the model: dtypes, parallel sizes, `max_sequence_length`. Raises
        InputError on a model that cannot be trained.
        """
        return megatron_settings(plan_of(hf_config))

    def to_megatron(
        self, name: str, hf: Mapping[str, torch.Tensor], hf_config: HfConfig
    ) -> torch.Tensor:
        """Return the full (unsharded) tensor of one Megatron parameter.

        Raises InputError on a parameter or a Hugging Face tensor that is not there.
        """
        plan = plan_of(hf_config)
        prefix, entry = _entry(plan, name)
        if entry.other and prefix + entry.names[0] not in hf:
            entry = entry.other
        return entry.join([_get(hf, prefix + part) for part in entry.names])

    def to_hf(
        self, full: Mapping[str, torch.Tensor], hf_config: HfConfig
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of full Megatron parameters.

        With tied embeddings the output layer is left out, as Hugging Face's own files do.
        """
        plan = plan_of(hf_config)
        out: dict[str, torch.Tensor] = {}
        for name, tensor in full.items():
            if name == _OUTPUT and plan.tied:
                continue
            prefix, entry = _entry(plan, name)
            for part, piece in zip(entry.names, entry.split(tensor), strict=True):
                out[prefix + part] = piece.contiguous()
        return out

    def untrained(self, names: Iterable[str], hf_config: HfConfig) -> tuple[str, ...]:
        """Return those tensors of a checkpoint that training leaves as they are.

        They are the vision tower and the layers that predict further tokens (MTP). An export
        copies them from the model that the training began with.
        """
        num_layers = plan_of(hf_config).num_layers
        return tuple(name for name in names if _is_untrained(name, num_layers))


def _is_untrained(name: str, num_layers: int) -> bool:
    layer = _HF_LAYER.search(name)
    return bool(_UNTRAINED.match(name) or (layer and int(layer[1]) >= num_layers))


@lru_cache(maxsize=8)
def _layer_kinds(plan: Plan) -> tuple[dict[str, Entry], ...]:
    """Return the entries of every layer; layers of one kind share theirs."""
    kinds: dict[tuple[bool, bool], dict[str, Entry]] = {}
    found = []
    for layer in range(plan.num_layers):
        kind = (layer in plan.linear_layers, plan.has_experts(layer))
        if kind not in kinds:
            kinds[kind] = layer_entries(plan, layer)
        found.append(kinds[kind])
    return tuple(found)


def _entry(plan: Plan, name: str) -> tuple[str, Entry]:
    """Return a parameter's entry and the prefix of its Hugging Face names."""
    top = {
        _EMBEDDING: (plan.prefix, "embed_tokens.weight"),
        "decoder.final_layernorm.weight": (plan.prefix, "norm.weight"),
        _OUTPUT: (plan.prefix, "embed_tokens.weight") if plan.tied else ("", "lm_head.weight"),
    }
    if name in top:
        prefix, hf_name = top[name]
        return prefix, same(hf_name)
    found = _LAYER.fullmatch(name)
    layer = int(found[1]) if found else plan.num_layers
    entries = _layer_kinds(plan)[layer] if layer < plan.num_layers else {}
    if not found or found[2] not in entries:
        raise InputError(
            f"Megatron parameter {name!r} has no counterpart in the model",
            hint="do config.json and the weights belong together?",
        )
    return f"{plan.prefix}layers.{layer}.", entries[found[2]]


def _get(hf: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    try:
        return hf[name]
    except KeyError:
        raise InputError(
            f"the model's weights lack {name!r}", hint="is the model folder complete?"
        ) from None
