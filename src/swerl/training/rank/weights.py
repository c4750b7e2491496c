"""Load a rank's part of the weights, and gather whole tensors from all ranks, one at a time.

Tensor ranks share a parameter as Megatron-Core's marks on it define. Routed experts are stacked
along their first axis, which expert ranks share; expert-tensor ranks cut them further. Pipeline
stages hold different layers. A rank holds at most one whole tensor that is not its own.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import InputError
from swerl.training.model_folder import LazyTensors

_LAYERS = "decoder.layers."
WHOLE = -1
"""Mark in place of an axis: tensor ranks hold copies, although Megatron counts each of them."""


def load(
    model: GPTModel, folder: Path, mapping: MegatronMapping, hf_config: Mapping[str, Json]
) -> None:
    """Fill this rank's parameters from the safetensors files of a folder.

    Raises InputError if the files do not match the config.
    """
    with LazyTensors(folder) as hf, torch.no_grad():
        for name, param in model.named_parameters():
            full = mapping.to_megatron(global_name(model, name), hf, hf_config)
            part = own_part(full, param)
            if part.shape != param.shape:
                raise InputError(
                    f"{folder} holds a {name} of shape {tuple(part.shape)}, "
                    f"its config.json requires {tuple(param.shape)}",
                    hint="config.json and weights must be of the same model",
                )
            param.copy_(part)


def tensors(
    params: Mapping[str, torch.nn.Parameter],
    read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters whole on all ranks; they are given by their names in the whole model.

    `read` returns a parameter's value on the device; it may be elsewhere meanwhile. All ranks must
    exhaust it together. Tensors keep their dtype; layers come in order. Tied weights are in the
    first and the last pipeline stage, so they come twice.
    """
    stages = parallel_state.get_pipeline_model_parallel_group()
    listed: list[list[_WholeParam]] = [[] for _ in range(stages.size())]
    entries = [_WholeParam(name, whole_shape(param), param.dtype) for name, param in params.items()]
    dist.all_gather_object(listed, entries, group=stages)
    device = next(iter(params.values())).device
    for stage, names in enumerate(listed):
        source = dist.get_global_rank(stages, stage)
        for entry in names:
            if stage == stages.rank():
                tensor = whole(params[entry.name], read)
            else:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if stages.size() > 1:
                dist.broadcast(tensor, src=source, group=stages)
            yield entry.name, tensor


def global_name(model: GPTModel, name: str) -> str:
    """Return a parameter's name, with its layer's number in the whole model."""
    if not name.startswith(_LAYERS):
        return name
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    layer = model.decoder.layers[int(number)]
    return f"{_LAYERS}{layer.layer_number - 1}.{rest}"


def own_part(full: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    for cut in _cuts(param):
        stacked = full.chunk(cut.num_stacked, cut.dim)
        parts = [part.chunk(cut.group.size(), cut.dim)[cut.group.rank()] for part in stacked]
        full = torch.cat(parts, cut.dim) if len(parts) > 1 else parts[0]
    return full


def whole(
    param: torch.nn.Parameter, read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> torch.Tensor:
    """Return a parameter of this stage whole. The ranks that share it must call it together."""
    full = read(param).detach()
    for cut in reversed(_cuts(param)):
        parts = [torch.empty_like(full) for _ in range(cut.group.size())]
        dist.all_gather(parts, full.contiguous(), group=cut.group)
        pieces = [part.chunk(cut.num_stacked, cut.dim) for part in parts]
        ordered = [piece[i] for i in range(cut.num_stacked) for piece in pieces]
        full = torch.cat(ordered, cut.dim)
    return full.contiguous()


@dataclass(frozen=True, slots=True)
class _WholeParam:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RankCut:
    """The ranks of a group share one axis of a parameter."""

    dim: int
    group: dist.ProcessGroup
    num_stacked: int = 1
    """Matrices stacked along the axis; each is cut by itself."""


def rank_cuts(param: torch.nn.Parameter) -> list[RankCut]:
    """Return how ranks share a parameter, by the marks that Megatron-Core's layers set on it."""
    cuts = []
    if belongs_to_experts(param):
        cuts.append(RankCut(0, parallel_state.get_expert_model_parallel_group()))
    marks = vars(param)
    if is_split(param):
        group = tensor_group(param)
        cuts.append(RankCut(marks["partition_dim"], group, marks["partition_stride"]))
    return cuts


def is_split(param: torch.nn.Parameter) -> bool:
    """Return whether tensor ranks share a parameter; otherwise each holds all of it."""
    marks = vars(param)
    return bool(marks.get("tensor_model_parallel")) and marks["partition_dim"] != WHOLE


def belongs_to_experts(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter holds routed experts, which expert ranks share."""
    return not getattr(param, "allreduce", True)


def tensor_group(param: torch.nn.Parameter) -> dist.ProcessGroup:
    """Return the tensor-parallel ranks that share a parameter, or hold copies of it."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if belongs_to_experts(param)
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def _cuts(param: torch.nn.Parameter) -> list[RankCut]:
    return [cut for cut in rank_cuts(param) if cut.group.size() > 1]


def whole_shape(param: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter in the whole model."""
    shape = list(param.shape)
    for cut in _cuts(param):
        shape[cut.dim] *= cut.group.size()
    return tuple(shape)
