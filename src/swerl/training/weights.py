"""Weights in and out: a Hugging Face folder to this rank's parameters, and back."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import InputError
from swerl.core.files import disk_errors
from swerl.core.learning import WeightRef
from swerl.training.rank.gather import global_name, own_part
from swerl.training.safetensors_files import LazyTensors, ShardWriter
from swerl.training.tiny_model import copy_tokenizer

KEPT_VERSIONS = 2
"""Published folders kept: the one that serves and the one before it."""


def read_config(folder: Path) -> dict[str, Json]:
    """Return the model's config.json. Raises InputError where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {folder / 'config.json'}: {error}",
            hint="name a model folder in Hugging Face format",
        ) from error
    assert isinstance(config, dict)
    return config


def load(
    model: GPTModel, folder: Path, mapping: MegatronMapping, hf_config: Mapping[str, Json]
) -> None:
    """Fill this rank's parameters from the safetensors files of a folder.

    Raises InputError where the files do not belong to the config.
    """
    with LazyTensors(folder) as hf, torch.no_grad():
        for name, param in model.named_parameters():
            full = mapping.to_megatron(global_name(model, name), hf, hf_config)
            part = own_part(full, param)
            if part.shape != param.shape:
                raise InputError(
                    f"{folder} holds a {name} of shape {tuple(part.shape)}, "
                    f"its config.json asks for {tuple(param.shape)}",
                    hint="config.json and weights must be of one model",
                )
            param.copy_(part)


def publish(tensors: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path) -> WeightRef:
    """Write Hugging Face tensors as a model folder that appears at once under its version.

    They are written one by one as they come. `source` gives config.json and the tokenizer's files.
    Older versions are removed. Raises RunError on a full disk.
    """
    temporary = target.with_name(f".{target.name}.part")
    try:
        with disk_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            with ShardWriter(temporary) as writer:
                for name, tensor in tensors:
                    writer.add(name, tensor)
            shutil.copyfile(source / "config.json", temporary / "config.json")
            copy_tokenizer(source, temporary)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    keep_newest(target.parent, KEPT_VERSIONS)
    return WeightRef(target, target.name, writer.checksum)


def keep_newest(parent: Path, num_kept: int) -> None:
    """Remove all but the folders written last, whatever their names: a run may step back."""
    folders = [path for path in parent.iterdir() if path.is_dir() and path.name[0] != "."]
    folders.sort(key=lambda path: path.stat().st_mtime_ns)
    for old in folders[:-num_kept]:
        shutil.rmtree(old, ignore_errors=True)
