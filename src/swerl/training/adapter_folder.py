"""Adapters as PEFT names and stores them, and merged into the weights of their model.

`A` is (parts, rank, input), `B` has the weight's shape with the rank in place of the input; the
trainer's checkpoints hold them so (`rank/lora.py`). PEFT adapts stacked experts as parameters: all
A one below the other, and in B the experts of a rank next to each other.
"""

# heavy imports: this file only runs in the trainer's own processes and in exports

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.files import write_json
from swerl.engines._weights import checksum
from swerl.recipe.hub import model_name
from swerl.recipe.schema import LoraSection

LORA = "_lora."
"""Between a weight's name and its adapter's A or B."""
WEIGHTS = "adapter_model.safetensors"
"""PEFT's name of the file with the tensors."""
_PEFT = "base_model.model."
_EXPERTS = re.compile(r"(.*\.experts)\..*")
_STACKS = {"fc1": ("gate_up_proj", ".base_layer"), "fc2": ("down_proj", "")}
"""Megatron-Core's parameter -> transformers' name of it, and PEFT's wrapper among the two."""


class Factors(NamedTuple):
    """An adapter of one weight, whole."""

    weight: str
    """The weight's name in Megatron-Core."""
    A: torch.Tensor
    B: torch.Tensor


def in_pairs(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Factors]:
    """Join A and B, which follow each other; any other tensor is left out."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        weight, separator, part = name.partition(LORA)
        if separator and part == "A":
            waiting[weight] = tensor
        elif separator and weight in waiting:
            yield Factors(weight, waiting.pop(weight), tensor)


def merge(
    factors: Factors,
    weight: torch.Tensor,
    scale: float,
    mapping: MegatronMapping,
    hf_config: Mapping[str, Json],
) -> dict[str, torch.Tensor]:
    """Return the Hugging Face tensors of a weight with its adapter's change added, in its type."""
    return {
        name: (piece.float() + scale * (B.float() @ A.float())).to(piece.dtype)
        for (name, A, B), piece in zip(
            _by_layer(factors, mapping, hf_config),
            mapping.to_hf({factors.weight: weight}, hf_config).values(),
            strict=True,
        )
    }


def to_peft(
    factors: Factors, mapping: MegatronMapping, hf_config: Mapping[str, Json]
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by PEFT's names."""
    layers = _by_layer(factors, mapping, hf_config)
    if experts := _EXPERTS.fullmatch(layers[0][0]):
        A, B = factors.A, factors.B.flatten(1, -2)
        _, wrapper = _STACKS[factors.weight.rpartition(".")[2]]
        path = f"{_PEFT}{experts[1]}{wrapper}"
        return {
            f"{path}.lora_A.weight": A.flatten(0, 1),
            f"{path}.lora_B.weight": B.permute(1, 2, 0).flatten(1).contiguous(),
        }
    return {
        f"{_PEFT}{name.removesuffix('weight')}lora_{kind}.weight": tensor.contiguous()
        for name, *pair in layers
        for kind, tensor in zip("AB", pair, strict=True)
    }


def write_adapters(
    folder: Path, tensors: Mapping[str, torch.Tensor], lora: LoraSection, *, model: Path
) -> str:
    """Write PEFT's folder of tensors with its names; return their checksum. Raises OSError."""
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    paths = {name.removeprefix(_PEFT).rpartition(".lora_")[0] for name in tensors}
    is_stack = re.compile(r".*\.experts(\.base_layer)?")
    stacked = any(map(is_stack.fullmatch, paths))
    modules = {path.rpartition(".")[2] for path in paths if not is_stack.fullmatch(path)}
    parameters = [f"mlp.experts.{name}" for name, _ in _STACKS.values()] if stacked else None
    base, _, revision = model_name(model).partition("@")
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base if revision else str(model),
            "revision": revision or None,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": sorted(modules),
            "target_parameters": parameters,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        },
    )
    return checksum(folder)


def _by_layer(
    factors: Factors, mapping: MegatronMapping, hf_config: Mapping[str, Json]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return name, A and B of each Hugging Face tensor of a weight."""
    # B's rows lie like the weight's, so the weight's own rule takes them apart.
    pieces = list(mapping.to_hf({factors.weight: factors.B}, hf_config).items())
    return [
        # Stacked experts are one tensor; by themselves gate and up of one expert share its A.
        (name, factors.A if B.ndim > 2 else factors.A[number * len(factors.A) // len(pieces)], B)
        for number, (name, B) in enumerate(pieces)
    ]
