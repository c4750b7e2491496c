"""Moves weights between Hugging Face's names and Megatron-Core's, for every trained model line.

Which line it is says `model_type` in the model's config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from swerl.core.chat import Json
from swerl.core.errors import InputError
from swerl.engines.families._megatron_plan import (
    AttentionPlan,
    DeltaPlan,
    ExpertsPlan,
    HfConfig,
    ModelPlan,
    megatron_settings,
    plan_of,
)

if TYPE_CHECKING:
    import torch

Join: TypeAlias = "Callable[[Sequence[torch.Tensor]], torch.Tensor]"
Split: TypeAlias = "Callable[[torch.Tensor], Sequence[torch.Tensor]]"


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How one parameter is read and written."""

    names: tuple[str, ...]
    """Hugging Face's names, after the layer's prefix."""
    join: Join
    split: Split
    other: TensorRule | None = None
    """Another form in which checkpoints hold it; it is read and never written."""


def same(name: str) -> TensorRule:
    """Return the entry of a parameter that only changes its name."""
    return TensorRule((name,), _only, lambda whole: (whole,))


def stacked_halves(first: str, second: str) -> TensorRule:
    """Return the entry of two matrices of one size, one on top of the other."""
    return TensorRule((first, second), _cat, lambda whole: whole.chunk(2))


def grouped(names: Sequence[str], rows: Sequence[int], num_groups: int) -> TensorRule:
    """Return the entry of tensors whose rows stand together by group.

    Tensor number i has `rows[i]` rows a group, and a group holds the tensors' rows one after the
    other. So any cut between groups gives each part whole groups.
    """

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        by_group = [
            part.reshape(num_groups, size, *part.shape[1:])
            for part, size in zip(parts, rows, strict=True)
        ]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        import torch

        by_group = whole.reshape(num_groups, sum(rows), *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(by_group, list(rows), dim=1)]

    return TensorRule(tuple(names), join, split)


def _only(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    (part,) = parts
    return part


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(list(parts))


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
def _layer_kinds(plan: ModelPlan) -> tuple[dict[str, TensorRule], ...]:
    """Return the entries of every layer; layers of one kind share theirs."""
    kinds: dict[tuple[bool, bool], dict[str, TensorRule]] = {}
    found = []
    for layer in range(plan.num_layers):
        kind = (layer in plan.linear_layers, plan.has_experts(layer))
        if kind not in kinds:
            kinds[kind] = layer_entries(plan, layer)
        found.append(kinds[kind])
    return tuple(found)


def _entry(plan: ModelPlan, name: str) -> tuple[str, TensorRule]:
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


_NORMS = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
}
_DENSE = {
    "mlp.linear_fc1.weight": stacked_halves("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}


def layer_entries(plan: ModelPlan, layer: int) -> dict[str, TensorRule]:
    """Return a layer's entries by Megatron's names, after the layer's prefix."""
    entries = dict(_NORMS)
    if layer in plan.linear_layers and plan.delta:
        entries |= _delta(plan.delta)
    else:
        entries |= _attention(plan.attention)
    if plan.experts and plan.has_experts(layer):
        entries |= _experts(plan.experts)
    else:
        entries |= _DENSE
    return entries


def _attention(shape: AttentionPlan) -> dict[str, TensorRule]:
    """Megatron keeps a query group's heads, their gates, its key and its value together."""
    query = shape.num_heads // shape.num_groups * shape.head_dim
    rows = (query, shape.head_dim, shape.head_dim)
    names = [f"self_attn.{part}_proj" for part in "qkv"]
    entries = {"self_attention.linear_proj.weight": same("self_attn.o_proj.weight")}
    for kind in ("weight", "bias") if shape.bias else ("weight",):
        entry = grouped([f"{name}.{kind}" for name in names], rows, shape.num_groups)
        entries[f"self_attention.linear_qkv.{kind}"] = _gated(entry, shape, rows)
    if shape.normed:
        for part in "qk":
            name = f"self_attn.{part}_norm.weight"
            entries[f"self_attention.{part}_layernorm.weight"] = same(name)
    return entries


def _gated(entry: TensorRule, shape: AttentionPlan, rows: tuple[int, int, int]) -> TensorRule:
    """Hugging Face interleaves each query head with its gate, Megatron parts them by group."""
    if not shape.gated:
        return entry
    groups, per_group = shape.num_groups, shape.num_heads // shape.num_groups
    size = shape.head_dim

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        mixed, key, value = parts
        rest = mixed.shape[1:]
        by_head = mixed.reshape(groups, per_group, 2, size, *rest)
        pieces = [by_head.transpose(1, 2).reshape(groups, 2 * rows[0], *rest)]
        pieces += [part.reshape(groups, size, *rest) for part in (key, value)]
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        import torch

        rest = whole.shape[1:]
        by_group = whole.reshape(groups, -1, *rest)
        mixed, key, value = torch.split(by_group, [2 * rows[0], *rows[1:]], dim=1)
        by_head = mixed.reshape(groups, 2, per_group, size, *rest).transpose(1, 2)
        return [by_head.reshape(-1, *rest), key.flatten(0, 1), value.flatten(0, 1)]

    return replace(entry, join=join, split=split)


def _delta(shape: DeltaPlan) -> dict[str, TensorRule]:
    """A key head's rows stand together: its query, key and values, their gates and decays."""
    groups = shape.num_key_heads
    per_group = shape.num_value_heads // groups
    values = per_group * shape.value_dim
    mixed = (shape.key_dim, shape.key_dim, values)
    projections = grouped(
        [f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")],
        (sum(mixed), values, per_group, per_group),
        groups,
    )
    return {
        "self_attention.in_proj.weight": _by_head(projections, mixed, groups),
        "self_attention.conv_weight": _by_head(
            TensorRule(
                ("linear_attn.conv1d.weight",),
                lambda parts: parts[0].squeeze(1),
                lambda whole: (whole.unsqueeze(1),),
            ),
            mixed,
            groups,
        ),
        "self_attention.A_log": same("linear_attn.A_log"),
        "self_attention.dt_bias": same("linear_attn.dt_bias"),
        "self_attention.norm_weight": same("linear_attn.norm.weight"),
        "self_attention.out_proj.weight": same("linear_attn.out_proj.weight"),
    }


def _by_head(entry: TensorRule, rows: tuple[int, ...], groups: int) -> TensorRule:
    """The first tensor of the entry holds all queries, then all keys, then all values."""
    heads = grouped(["q", "k", "v"], rows, groups)
    sizes = [size * groups for size in rows]

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return entry.join([heads.join(torch.split(parts[0], sizes)), *parts[1:]])

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        import torch

        first, *rest = entry.split(whole)
        return [torch.cat(list(heads.split(first))), *rest]

    return replace(entry, join=join, split=split)


def _experts(shape: ExpertsPlan) -> dict[str, TensorRule]:
    entries = {
        "mlp.router.weight": same("mlp.gate.weight"),
        "mlp.experts.fc1": _expert_inputs(shape),
        "mlp.experts.fc2": _expert_outputs(shape),
    }
    if shape.bias:
        entries["mlp.router.expert_bias"] = same("mlp.gate.e_score_correction_bias")
    if shape.shared_width:
        shared = f"mlp.{shape.shared_name}"
        entries["mlp.shared_experts.linear_fc1.weight"] = stacked_halves(
            f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"
        )
        entries["mlp.shared_experts.linear_fc2.weight"] = same(f"{shared}.down_proj.weight")
    if shape.shared_gate:
        entries["mlp.shared_experts.gate_weight"] = same("mlp.shared_expert_gate.weight")
    return entries


def _expert_inputs(shape: ExpertsPlan) -> TensorRule:
    """(experts, gate and up, width, hidden)."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(list(parts)).reshape(shape.num, 2, *parts[0].shape)

    stacked = TensorRule(
        ("mlp.experts.gate_up_proj",),
        lambda parts: parts[0].reshape(shape.num, 2, shape.width, -1),
        lambda whole: (whole.flatten(1, 2),),
    )
    names = [
        f"mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(shape.num)
        for part in ("gate", "up")
    ]
    return _published(
        stacked, TensorRule(tuple(names), join, lambda w: w.flatten(0, 1).unbind()), shape
    )


def _expert_outputs(shape: ExpertsPlan) -> TensorRule:
    """(experts, hidden, width)."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(list(parts))

    names = [f"mlp.experts.{expert}.down_proj.weight" for expert in range(shape.num)]
    single = TensorRule(tuple(names), join, lambda whole: whole.unbind())
    return _published(same("mlp.experts.down_proj"), single, shape)


def _published(stacked: TensorRule, single: TensorRule, shape: ExpertsPlan) -> TensorRule:
    if shape.stacked:
        return replace(stacked, other=single)
    return replace(single, other=stacked)
