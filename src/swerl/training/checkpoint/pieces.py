"""Which pieces of the model's whole tensors a rank holds, whatever the parallel layout.

A checkpoint names every tensor by the whole model and cuts it into boxes. A rank's part of a
parameter follows from the marks that Megatron-Core's layers leave on it; a rank's part of the
optimizer's state is a flat range of that (ZeRO), which falls into a few boxes. So each rank writes
what it has, without asking another, and any other layout finds what it needs by overlap.
"""

# heavy imports: this file only runs in the trainer's own processes and in exports

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one whole tensor, and this rank's memory of it."""

    key: str
    """Name of the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    data: torch.Tensor
    """A view of the live tensor, of the box's shape."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks share one dimension of a parameter."""

    dim: int
    rank: int
    num_ranks: int
    num_stacked: int = 1
    """Matrices stacked along the dimension, each of which is cut by itself."""


def cuts(param: torch.nn.Parameter) -> list[Cut]:
    """Return how the ranks share a parameter, from Megatron-Core's marks on it."""
    from megatron.core import parallel_state

    found = []
    is_expert = belongs_to_experts(param)
    if is_expert:
        found.append(
            Cut(
                0,
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_model_parallel_world_size(),
            )
        )
    if getattr(param, "tensor_model_parallel", False):
        marks = vars(param)
        rank, num_ranks = _tensor_rank(is_expert=is_expert)
        found.append(Cut(marks["partition_dim"], rank, num_ranks, marks["partition_stride"]))
    return found


def belongs_to_experts(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter belongs to routed experts, each of which some ranks hold."""
    return not getattr(param, "allreduce", True)


def is_first_copy(param: torch.nn.Parameter) -> bool:
    """Return whether this rank is the first of the tensor-parallel ranks that hold the same."""
    is_expert = belongs_to_experts(param)
    is_cut = getattr(param, "tensor_model_parallel", False)
    return is_cut or _tensor_rank(is_expert=is_expert)[0] == 0


def pieces(
    key: str,
    local: torch.Tensor,
    local_shape: Sequence[int],
    cuts: Sequence[Cut],
    *,
    start: int = 0,
) -> Iterator[Piece]:
    """Cut this rank's memory of a tensor into boxes of the whole one.

    `local` holds the elements from `start` on of this rank's part, which has `local_shape`; all
    of them, or a range.
    """
    by_dim = {cut.dim: cut for cut in cuts}
    whole = [Cut(dim, 0, 1) for dim in range(len(local_shape))]
    shares = [by_dim.get(cut.dim, cut) for cut in whole]
    widths = [size // share.num_stacked for size, share in zip(local_shape, shares, strict=True)]
    # Each dimension becomes two: which stacked matrix, and where in it.
    layered = [
        n for share, width in zip(shares, widths, strict=True) for n in (share.num_stacked, width)
    ]
    shape = tuple(size * share.num_ranks for size, share in zip(local_shape, shares, strict=True))
    flat = local.detach().reshape(-1)
    for box in _boxes(start, start + flat.numel(), layered):
        begin = box.begin - start
        view = flat[begin : begin + math.prod(box.sizes)].view(box.sizes)
        for stacked in product(*(range(size) for size in box.sizes[::2])):
            index = tuple(part for number in stacked for part in (number, slice(None)))
            offsets = tuple(
                ((box.offsets[2 * dim] + stacked[dim]) * share.num_ranks + share.rank) * width
                + box.offsets[2 * dim + 1]
                for dim, (share, width) in enumerate(zip(shares, widths, strict=True))
            )
            yield Piece(key, shape, offsets, view[index])


@dataclass(frozen=True, slots=True)
class _Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """Number of its first element, counted row by row."""


def _boxes(start: int, end: int, shape: Sequence[int], begin: int = 0) -> Iterator[_Box]:
    """Cut the elements `start` to `end` of an array, counted row by row, into boxes."""
    if start >= end:
        return
    if not shape:
        yield _Box((), (), begin)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from _in_row(last, start, end, shape, begin)
        return
    yield from _in_row(first - 1, start, first * row, shape, begin)
    if first < last:
        offsets = (first, *(0 for _ in shape[1:]))
        yield _Box(offsets, (last - first, *shape[1:]), begin + first * row)
    yield from _in_row(last, last * row, end, shape, begin)


def _in_row(number: int, start: int, end: int, shape: Sequence[int], begin: int) -> Iterator[_Box]:
    row = math.prod(shape[1:])
    at = number * row
    for box in _boxes(start - at, end - at, shape[1:], begin + at):
        yield _Box((number, *box.offsets), (1, *box.sizes), box.begin)


def _tensor_rank(*, is_expert: bool) -> tuple[int, int]:
    from megatron.core import parallel_state

    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
