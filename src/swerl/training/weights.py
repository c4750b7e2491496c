"""Weights in and out: a Hugging Face folder to this rank's parameters, and back."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swerl.chat import Json
from swerl.engines._weights import checksum, shards
from swerl.errors import InputError, SwerlError, TrainerError
from swerl.interfaces import MegatronMapping
from swerl.learning import WeightRef
from swerl.run.files import disk_errors
from swerl.training.tiny_model import copy_tokenizer

KEPT_VERSIONS = 2
"""Published folders kept: the one that serves and the one before it."""


def read_config(folder: Path) -> dict[str, Json]:
    """Return the model's config.json. Raises InputError where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"cannot read {folder / 'config.json'}: {error}"
        raise InputError(message, hint="name a model folder in Hugging Face format") from error
    assert isinstance(config, dict)
    return config


def load(
    model: torch.nn.Module, folder: Path, mapping: MegatronMapping, hf_config: Mapping[str, Json]
) -> None:
    """Fill this rank's parameters from the safetensors files of a folder.

    Raises InputError where the files do not belong to the config.
    """
    hf = _read_tensors(folder)
    with torch.no_grad():
        for name, param in model.named_parameters():
            part = _own_part(mapping.to_megatron(name, hf, hf_config), param)
            if part.shape != param.shape:
                message = (
                    f"{folder} holds a {name} of shape {tuple(part.shape)}, "
                    f"its config.json asks for {tuple(param.shape)}"
                )
                raise InputError(message, hint="config.json and weights must be of one model")
            param.copy_(part)


def gather(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter whole, on the CPU in fp32. All ranks must call it together."""
    return {
        name: _whole(param).detach().to("cpu", torch.float32)
        for name, param in model.named_parameters()
    }


def publish(tensors: Mapping[str, torch.Tensor], source: Path, target: Path) -> WeightRef:
    """Write Hugging Face tensors as a model folder that appears at once under its version.

    `source` gives config.json and the tokenizer's files. Older versions are removed. Raises
    RunError on a full disk.
    """
    temporary = target.with_name(f".{target.name}.part")
    with disk_errors(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _save(tensors, temporary / "model.safetensors")
        shutil.copyfile(source / "config.json", temporary / "config.json")
        copy_tokenizer(source, temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    keep_newest(target.parent, KEPT_VERSIONS)
    return WeightRef(target, target.name, checksum(target))


def keep_newest(parent: Path, num_kept: int) -> None:
    """Remove all but the folders written last, whatever their names: a run may step back."""
    folders = [path for path in parent.iterdir() if path.is_dir() and path.name[0] != "."]
    folders.sort(key=lambda path: path.stat().st_mtime_ns)
    for old in folders[:-num_kept]:
        shutil.rmtree(old, ignore_errors=True)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in shards(folder):
            tensors |= load_file(path)
    except (OSError, SafetensorError, SwerlError) as error:
        message = f"cannot read the weights in {folder}: {error}"
        raise InputError(message, hint="is the folder whole? fetch or publish it again") from error
    return tensors


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        message = f"cannot write {path}: {error}"
        raise TrainerError(message, hint="is the disk full?") from error


def _own_part(full: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Cut this tensor-parallel rank's part out of a whole tensor."""
    split = _split(param)
    if split is None:
        return full
    rank = parallel_state.get_tensor_model_parallel_rank()
    stacked = full.chunk(split.num_stacked, split.dim)
    return torch.cat([part.chunk(split.num_ranks, split.dim)[rank] for part in stacked], split.dim)


def _whole(param: torch.nn.Parameter) -> torch.Tensor:
    split = _split(param)
    if split is None:
        return param
    parts = [torch.empty_like(param) for _ in range(split.num_ranks)]
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(parts, param.detach().contiguous(), group=group)
    pieces = [part.chunk(split.num_stacked, split.dim) for part in parts]
    ordered = [piece[i] for i in range(split.num_stacked) for piece in pieces]
    return torch.cat(ordered, split.dim)


@dataclass(frozen=True, slots=True)
class _Split:
    """How tensor-parallel ranks share a parameter."""

    num_ranks: int
    dim: int
    num_stacked: int
    """Matrices stacked in the parameter, each of which is cut by itself."""


def _split(param: torch.nn.Parameter) -> _Split | None:
    num_ranks = parallel_state.get_tensor_model_parallel_world_size()
    if num_ranks == 1 or not getattr(param, "tensor_model_parallel", False):
        return None
    # Attributes that Megatron-Core sets on the parameters of its parallel layers.
    values = vars(param)
    return _Split(num_ranks, values["partition_dim"], values["partition_stride"])
