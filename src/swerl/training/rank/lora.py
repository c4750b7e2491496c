"""LoRA adapters (arXiv 2106.09685) on the linear layers of a built model, whose weights are frozen.

An adapter adds `alpha / rank * B A x` to a layer's output. Megatron-Core fuses some of Hugging
Face's layers into one; each of them keeps an A of its own, so that the adapters are those that PEFT
makes on the separate layers. The rows of B lie like the rows of the fused weight. Of routed experts
each has an A and a B, as PEFT's `target_parameters` have; gate and up share an A.

An adapter's parameters are called like their weight, with `_lora.A` and `_lora.B` appended.

Tensor ranks share the axes that they share of the weight. The rest of an adapter is on all of them:
its gradients are summed, as those of norms are. Between A and B only `rank` numbers a position
travel.

Axes: P layers fused in one, R rank, I input, O output, E experts of this rank.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import TrainerError
from swerl.training.options import TrainerOptions
from swerl.training.rank.weights import WHOLE, global_name, own_part, whole_shape

_TARGETS = {
    "attention": re.compile(r".*\.self_attention\.linear_(qkv|proj)\.weight"),
    "delta_net": re.compile(r".*\.self_attention\.(in|out)_proj\.weight"),
    "mlp": re.compile(r".*\.mlp\.(shared_experts\.)?linear_fc[12]\.weight"),
    "experts": re.compile(r".*\.mlp\.experts\.fc[12]"),
}
Read = Callable[[torch.Tensor], torch.Tensor]


class Adapter(torch.nn.Module):
    """The two matrices of one weight; use `wide` or `of_experts`, by the kind of layer."""

    def __init__(self, weight: torch.nn.Parameter, num_parts: int, rank: int, scale: float) -> None:
        """`num_parts` is P, or the experts of this rank."""
        super().__init__()
        new = weight.new_zeros
        self.A = torch.nn.Parameter(new(num_parts, rank, weight.shape[-1]))
        self.B = torch.nn.Parameter(new(*weight.shape[:-1], rank))
        self.scale = scale
        self.active = True
        self.is_part_OP1: torch.Tensor | None = None
        """1 where a row of B belongs to a fused layer; None for a layer by itself."""

    def delta(self, read: Read) -> torch.Tensor:
        """Return the change of the weight in fp32; `read` returns a parameter's value."""
        A, B = read(self.A).float(), read(self.B).float()
        if B.ndim > 2:
            return self.scale * (B.flatten(1, -2) @ A).reshape(*B.shape[:-1], A.shape[-1])
        return self.scale * self._wide(B) @ A.flatten(0, 1)

    def add(
        self, layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, None]
    ) -> tuple[torch.Tensor, None]:
        """Add to a parallel linear layer's output, as a hook after its forward pass."""
        if not self.active:
            return output
        inner = F.linear(inputs[0], self.A.flatten(0, 1))
        if layer.sequence_parallel and isinstance(layer, RowParallelLinear):
            inner = reduce_scatter_to_sequence_parallel_region(inner)
        elif layer.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner)
        return output[0] + F.linear(inner, self._wide(self.B)) * self.scale, output[1]

    def of_experts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A as (E, R, I) and B as (E, O, R)."""
        A, B = (_summed(param) for param in (self.A, self.B))
        return A, B.flatten(1, -2)

    def _wide(self, B_OR: torch.Tensor) -> torch.Tensor:
        """Return B as (O, P R): each row reads the numbers of its own layer's A."""
        if self.is_part_OP1 is None:
            return B_OR
        return (B_OR.unsqueeze(1) * self.is_part_OP1.to(B_OR)).flatten(1)


Adapters = Mapping[torch.nn.Parameter, Adapter]
"""By the weight that an adapter changes."""


def attach(
    model: GPTModel,
    options: TrainerOptions,
    mapping: MegatronMapping,
    hf_config: Mapping[str, Json],
) -> Adapters:
    """Freeze a model and add adapters that change nothing yet, the same ones under any layout.

    Raises TrainerError if this rank's layers have no target.
    """
    lora = options.lora
    adapters: dict[torch.nn.Parameter, Adapter] = {}
    for name, weight in list(model.named_parameters()):
        weight.requires_grad_(False)
        if not any(_TARGETS[target].fullmatch(name) for target in lora.targets):
            continue
        path, _, attribute = name.rpartition(".")
        layer, full_name = model.get_submodule(path), global_name(model, name)
        scale = lora.alpha / lora.rank
        if weight.ndim > 2:
            adapter = Adapter(weight, len(weight), lora.rank, scale)
        else:
            # The mapping itself tells which rows of the fused weight are whose.
            rows = torch.arange(whole_shape(weight)[0]).unsqueeze(1)
            parts = list(mapping.to_hf({full_name: rows}, hf_config).values())
            adapter = Adapter(weight, len(parts), lora.rank, scale)
            layer.register_forward_hook(adapter.add)
        _mark(adapter, weight)
        if weight.ndim == 2 and len(parts) > 1:
            is_part = torch.zeros(len(rows), len(parts), 1)
            for number, part in enumerate(parts):
                is_part[part.squeeze(1), number] = 1
            adapter.is_part_OP1 = own_part(is_part, adapter.B).to(weight)
        _draw(adapter.A, f"{options.seed} {full_name}")
        layer.add_module(f"{attribute}_lora", adapter)
        adapters[weight] = adapter
    if not adapters:
        raise TrainerError(
            f"no layer of this rank is in trainer.lora.targets = {list(lora.targets)}",
            hint="name the projections that the model has, or leave the key out",
        )
    return adapters


@contextmanager
def off(adapters: Adapters) -> Iterator[None]:
    """Run the frozen model alone: the policy before training."""
    for adapter in adapters.values():
        adapter.active = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.active = True


def merged(adapters: Adapters, read: Read) -> Read:
    """Return a reader of this rank's part of weights, with their adapters' changes added."""

    def value(weight: torch.Tensor) -> torch.Tensor:
        adapter = adapters.get(weight)  # type: ignore[call-overload]
        if adapter is None:
            return read(weight)
        whole: torch.Tensor = read(weight).float() + adapter.delta(read)
        return whole.to(weight.dtype)

    return value


def _mark(adapter: Adapter, weight: torch.nn.Parameter) -> None:
    """Set Megatron-Core's marks: how ranks share A and B, and sum their gradients."""
    marks = vars(weight)
    if marks["partition_dim"] == weight.ndim - 1:  # ranks share the input
        split, whole, dim, stride = adapter.A, adapter.B, 2, 1
    else:
        split, whole = adapter.B, adapter.A
        dim, stride = marks["partition_dim"], marks["partition_stride"]
    vars(split).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)
    if weight.ndim == 2:
        # Each rank's gradient comes from its positions, or its share of the other matrix.
        vars(whole).update(sequence_parallel=True)
        return
    for param in (adapter.A, adapter.B):
        vars(param)["allreduce"] = False
    # Ranks of other experts hold other numbers, so Megatron's tensor ranks tell no copies apart.
    is_copy = parallel_state.get_expert_tensor_parallel_rank() > 0
    vars(whole).update(
        tensor_model_parallel=True, partition_dim=WHOLE, partition_stride=1, shared=is_copy
    )


def _summed(param: torch.nn.Parameter) -> torch.Tensor:
    """Return an expert parameter whose gradient is summed over the ranks that share an expert."""
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1 or vars(param)["partition_dim"] != WHOLE:
        return param
    summed: torch.Tensor = copy_to_tensor_model_parallel_region(param, group)
    return summed


def _draw(A_PRI: torch.nn.Parameter, seed: str) -> None:
    """Draw A as PEFT does: evenly, up to one over the root of the inputs."""
    shape = whole_shape(A_PRI)
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    full = (2 * torch.rand(shape, generator=generator) - 1) / shape[-1] ** 0.5
    with torch.no_grad():
        A_PRI.copy_(own_part(full, A_PRI))
