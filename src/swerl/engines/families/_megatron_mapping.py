"""Convert weights between Hugging Face's names and Megatron-Core's, for every trained model line.

`model_type` in the model's config.json names the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Rule to read and write one Megatron parameter."""

    names: tuple[str, ...]
    """Hugging Face's names, after the layer's prefix."""
    join: Join
    split: Split
    other: TensorRule | None = None
    """Another form of it in checkpoints; it is read and never written."""


def same(name: str) -> TensorRule:
    """Return the rule of a parameter that only changes its name."""
    return TensorRule((name,), lambda parts: parts[0], lambda whole: (whole,))


def stacked_halves(first: str, second: str) -> TensorRule:
    """Return the rule of two matrices of one size, one on top of the other."""
    return TensorRule((first, second), _cat, lambda whole: whole.chunk(2))


def grouped(names: Sequence[str], rows: Sequence[int], num_groups: int) -> TensorRule:
    """Return the rule of tensors whose rows are interleaved by group.

    Tensor number i has `rows[i]` rows for each group; a group is the rows of all tensors in order.
    So a cut between groups never splits a group.
    """

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        by_group = [
            part.reshape(num_groups, size, *part.shape[1:])
            for part, size in zip(parts, rows, strict=True)
        ]
        return _cat(by_group, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        by_group = whole.reshape(num_groups, sum(rows), *whole.shape[1:])
        return [part.flatten(0, 1) for part in _split(by_group, rows, dim=1)]

    return TensorRule(tuple(names), join, split)


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch

    return torch.cat(list(parts), dim=dim)


def _split(whole: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[torch.Tensor]:
    import torch

    return torch.split(whole, list(sizes), dim=dim)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(list(parts))


_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_UNTRAINED = re.compile(r"(model\.visual|visual|mtp|model\.mtp)\.")
_HF_LAYER = re.compile(r"layers\.(\d+)\.")


class ModelMapping:
    """Implements MegatronMapping.

    A layer's number in a parameter's name counts in the whole model, also under pipeline
    parallelism. Experts are stacked in the order of their numbers.
    """

    def config(self, hf_config: HfConfig) -> Mapping[str, Json]:
        """Return the keyword arguments of Megatron's configuration, and the parts of each layer.

        `transformer` belongs to TransformerConfig, `model` to GPTModel. `rope` has RopePlan's
        fields. `layers` has one object for each layer: `attention` is full or gated_delta,
        `experts` is true for routed ones. `router` configures the choice of experts. The caller
        adds `activation_func` (SiLU) and settings that are not the model's: dtypes, parallel
        sizes, `max_sequence_length`. Raises InputError on a model that cannot be trained.
        """
        return megatron_settings(plan_of(hf_config))

    def names(self, hf_config: HfConfig) -> Iterator[str]:
        """Yield the names of all Megatron parameters, layer after layer."""
        plan = plan_of(hf_config)
        yield _EMBEDDING
        for layer, rules in enumerate(_layer_kinds(plan)):
            yield from (f"decoder.layers.{layer}.{name}" for name in rules)
        yield "decoder.final_layernorm.weight"
        if not plan.tied:
            yield _OUTPUT

    def to_megatron(
        self, name: str, hf: Mapping[str, torch.Tensor], hf_config: HfConfig
    ) -> torch.Tensor:
        """Return the full (unsharded) tensor of one Megatron parameter.

        Raises InputError on an unknown parameter and on a missing Hugging Face tensor.
        """
        prefix, rule = _rule(plan_of(hf_config), name)
        if rule.other and prefix + rule.names[0] not in hf:
            rule = rule.other
        for part in rule.names:
            if prefix + part not in hf:
                raise InputError(
                    f"the model's weights lack {prefix + part!r}",
                    hint="is the model folder complete?",
                )
        return rule.join([hf[prefix + part] for part in rule.names])

    def to_hf(
        self, full: Mapping[str, torch.Tensor], hf_config: HfConfig
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of full Megatron parameters.

        Tied embeddings have no output layer, as in Hugging Face's own files.
        """
        plan = plan_of(hf_config)
        out: dict[str, torch.Tensor] = {}
        for name, tensor in full.items():
            if name == _OUTPUT and plan.tied:
                continue
            prefix, rule = _rule(plan, name)
            for part, piece in zip(rule.names, rule.split(tensor), strict=True):
                out[prefix + part] = piece.contiguous()
        return out

    def untrained(self, names: Iterable[str], hf_config: HfConfig) -> tuple[str, ...]:
        """Return the tensors of a checkpoint that training does not change.

        They are the vision tower and the layers that predict further tokens (MTP). An export
        copies them from the model before training.
        """
        num_layers = plan_of(hf_config).num_layers

        def is_untrained(name: str) -> bool:
            layer = _HF_LAYER.search(name)
            return bool(_UNTRAINED.match(name) or (layer and int(layer[1]) >= num_layers))

        return tuple(filter(is_untrained, names))


@lru_cache(maxsize=8)
def _layer_kinds(plan: ModelPlan) -> tuple[dict[str, TensorRule], ...]:
    """Return the rules of every layer; layers of one kind share theirs."""
    kinds: dict[tuple[bool, bool], dict[str, TensorRule]] = {}
    rules = []
    for layer in range(plan.num_layers):
        kind = (layer in plan.linear_layers, plan.has_experts(layer))
        if kind not in kinds:
            kinds[kind] = layer_entries(plan, layer)
        rules.append(kinds[kind])
    return tuple(rules)


def _rule(plan: ModelPlan, name: str) -> tuple[str, TensorRule]:
    """Return the prefix of a parameter's Hugging Face names, and its rule."""
    top = {
        _EMBEDDING: (plan.prefix, "embed_tokens.weight"),
        "decoder.final_layernorm.weight": (plan.prefix, "norm.weight"),
        _OUTPUT: (plan.prefix, "embed_tokens.weight") if plan.tied else ("", "lm_head.weight"),
    }
    if name in top:
        prefix, hf_name = top[name]
        return prefix, same(hf_name)
    match = _LAYER.fullmatch(name)
    layer = int(match[1]) if match else plan.num_layers
    rules = _layer_kinds(plan)[layer] if layer < plan.num_layers else {}
    if not match or match[2] not in rules:
        raise InputError(
            f"Megatron parameter {name!r} has no counterpart in the model",
            hint="do config.json and the weights belong together?",
        )
    return f"{plan.prefix}layers.{layer}.", rules[match[2]]


_NORMS = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
}
_DENSE = {
    "mlp.linear_fc1.weight": stacked_halves("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}


def layer_entries(plan: ModelPlan, layer: int) -> dict[str, TensorRule]:
    """Return a layer's rules by Megatron's names, after the layer's prefix."""
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
    """Return the attention's rules.

    Megatron stores a query group's heads, their gates, its key and its value next to each other.
    """
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
    """Add the gates: Hugging Face puts each after its query head, Megatron after its group's."""
    if not shape.gated:
        return entry
    groups, per_group = shape.num_groups, shape.num_heads // shape.num_groups
    size = shape.head_dim

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        mixed, key, value = parts
        rest = mixed.shape[1:]
        by_head = mixed.reshape(groups, per_group, 2, size, *rest)
        pieces = [by_head.transpose(1, 2).reshape(groups, 2 * rows[0], *rest)]
        pieces += [part.reshape(groups, size, *rest) for part in (key, value)]
        return _cat(pieces, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        rest = whole.shape[1:]
        by_group = whole.reshape(groups, -1, *rest)
        mixed, key, value = _split(by_group, (2 * rows[0], *rows[1:]), dim=1)
        by_head = mixed.reshape(groups, 2, per_group, size, *rest).transpose(1, 2)
        return [by_head.reshape(-1, *rest), key.flatten(0, 1), value.flatten(0, 1)]

    return replace(entry, join=join, split=split)


def _delta(shape: DeltaPlan) -> dict[str, TensorRule]:
    """Return the rules of a gated delta net.

    Megatron stores a key head's rows together: query, key and values, their gates and decays.
    """
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
    """Regroup the rule's first tensor, which has all queries, then all keys, then all values."""
    heads = grouped(["q", "k", "v"], rows, groups)
    sizes = [size * groups for size in rows]

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return entry.join([heads.join(_split(parts[0], sizes)), *parts[1:]])

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        first, *rest = entry.split(whole)
        return [_cat(heads.split(first)), *rest]

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
    """Return the rule of a tensor [experts, gate and up, width, hidden]."""
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
    single = TensorRule(
        tuple(names),
        lambda parts: _stack(parts).reshape(shape.num, 2, *parts[0].shape),
        lambda whole: whole.flatten(0, 1).unbind(),
    )
    return _published(stacked, single, shape)


def _expert_outputs(shape: ExpertsPlan) -> TensorRule:
    """Return the rule of a tensor [experts, hidden, width]."""
    names = [f"mlp.experts.{expert}.down_proj.weight" for expert in range(shape.num)]
    single = TensorRule(tuple(names), _stack, lambda whole: whole.unbind())
    return _published(same("mlp.experts.down_proj"), single, shape)


def _published(stacked: TensorRule, single: TensorRule, shape: ExpertsPlan) -> TensorRule:
    """Return the form of published checkpoints, with the other one to read."""
    if shape.stacked:
        return replace(stacked, other=single)
    return replace(single, other=stacked)
