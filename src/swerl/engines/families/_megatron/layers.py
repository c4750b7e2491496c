"""The parameters of one layer, by the parts that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swerl.engines.families._megatron.entries import Entry, grouped, same, stacked_halves
from swerl.engines.families._megatron.plan import Attention, Delta, Experts, Plan

if TYPE_CHECKING:
    import torch

_NORMS = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
}
_DENSE = {
    "mlp.linear_fc1.weight": stacked_halves("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}


def layer_entries(plan: Plan, layer: int) -> dict[str, Entry]:
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


def _attention(shape: Attention) -> dict[str, Entry]:
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


def _gated(entry: Entry, shape: Attention, rows: tuple[int, int, int]) -> Entry:
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


def _delta(shape: Delta) -> dict[str, Entry]:
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
            Entry(
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


def _by_head(entry: Entry, rows: tuple[int, ...], groups: int) -> Entry:
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


def _experts(shape: Experts) -> dict[str, Entry]:
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


def _expert_inputs(shape: Experts) -> Entry:
    """(experts, gate and up, width, hidden)."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(list(parts)).reshape(shape.num, 2, *parts[0].shape)

    stacked = Entry(
        ("mlp.experts.gate_up_proj",),
        lambda parts: parts[0].reshape(shape.num, 2, shape.width, -1),
        lambda whole: (whole.flatten(1, 2),),
    )
    names = [
        f"mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(shape.num)
        for part in ("gate", "up")
    ]
    return _published(stacked, Entry(tuple(names), join, lambda w: w.flatten(0, 1).unbind()), shape)


def _expert_outputs(shape: Experts) -> Entry:
    """(experts, hidden, width)."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(list(parts))

    names = [f"mlp.experts.{expert}.down_proj.weight" for expert in range(shape.num)]
    single = Entry(tuple(names), join, lambda whole: whole.unbind())
    return _published(same("mlp.experts.down_proj"), single, shape)


def _published(stacked: Entry, single: Entry, shape: Experts) -> Entry:
    if shape.stacked:
        return replace(stacked, other=single)
    return replace(single, other=stacked)
