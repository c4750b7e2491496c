"""A rank's part of a whole tensor, and whole tensors out of all ranks' parts, one at a time.

Tensor ranks cut a parameter as Megatron-Core's marks on it say. Routed experts lie stacked along
their first axis, which expert ranks share, and are cut further by expert-tensor ranks. Pipeline
stages hold different layers. No rank ever holds more than one whole tensor that is not its own.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

_LAYERS = "decoder.layers."


def tensors(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter whole, by its name in the whole model, on all ranks alike.

    All ranks must run it to its end together. Tensors keep their dtype and device; layers come in
    their order. What is tied stands in the first and the last pipeline stage and comes twice.
    """
    stages = parallel_state.get_pipeline_model_parallel_group()
    own = {global_name(model, name): param for name, param in model.named_parameters()}
    listed: list[list[_Entry]] = [[] for _ in range(stages.size())]
    entries = [_Entry(name, _whole_shape(param), param.dtype) for name, param in own.items()]
    dist.all_gather_object(listed, entries, group=stages)
    device = next(model.parameters()).device
    for stage, found in enumerate(listed):
        source = dist.get_global_rank(stages, stage)
        for entry in found:
            if stage == stages.rank():
                tensor = whole(own[entry.name])
            else:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if stages.size() > 1:
                dist.broadcast(tensor, src=source, group=stages)
            yield entry.name, tensor


def global_name(model: GPTModel, name: str) -> str:
    """Return a parameter's name with its layer's number in the whole model."""
    if not name.startswith(_LAYERS):
        return name
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    layer = model.decoder.layers[int(number)]
    return f"{_LAYERS}{layer.layer_number - 1}.{rest}"


def own_part(full: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Cut this rank's part out of a whole tensor."""
    for cut in _cuts(param):
        stacked = full.chunk(cut.num_stacked, cut.dim)
        parts = [part.chunk(cut.group.size(), cut.dim)[cut.group.rank()] for part in stacked]
        full = torch.cat(parts, cut.dim) if len(parts) > 1 else parts[0]
    return full


def whole(param: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter of this stage whole. The ranks that share it must call it together."""
    full = param.detach()
    for cut in reversed(_cuts(param)):
        parts = [torch.empty_like(full) for _ in range(cut.group.size())]
        dist.all_gather(parts, full.contiguous(), group=cut.group)
        pieces = [part.chunk(cut.num_stacked, cut.dim) for part in parts]
        ordered = [piece[i] for i in range(cut.num_stacked) for piece in pieces]
        full = torch.cat(ordered, cut.dim)
    return full.contiguous()


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Cut:
    """How ranks share one axis of a parameter."""

    dim: int
    group: dist.ProcessGroup
    num_stacked: int = 1
    """Matrices stacked along the axis, each of which is cut by itself."""


def _cuts(param: torch.nn.Parameter) -> list[_Cut]:
    # Attributes that Megatron-Core sets on the parameters of its parallel layers.
    marks = vars(param)
    of_experts = not marks.get("allreduce", True)
    found = []
    if of_experts:
        found.append(_Cut(0, parallel_state.get_expert_model_parallel_group()))
    if marks.get("tensor_model_parallel"):
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if of_experts
            else parallel_state.get_tensor_model_parallel_group()
        )
        found.append(_Cut(marks["partition_dim"], group, marks["partition_stride"]))
    return [cut for cut in found if cut.group.size() > 1]


def _whole_shape(param: torch.nn.Parameter) -> tuple[int, ...]:
    shape = list(param.shape)
    for cut in _cuts(param):
        shape[cut.dim] *= cut.group.size()
    return tuple(shape)
