"""Places of packed rows: shared prefixes, positions of a context rank, exchanges between ranks.

Rows may share prefixes. A row then adds only its own positions to the pack, a segment, and its path
is the beginning of the path of the row before it and its segment (`Forest`).

Each segment is padded at its end and cut into twice as many pieces as there are context ranks.
Rank r holds the pieces r and 2 * ranks - 1 - r, a cheap early one and an expensive late one, so
causal attention costs every rank the same (Llama 3, arXiv 2407.21783, section 3.3.2).

Layers that run along a row, such as a gated delta net, cannot start in its middle. While such a
layer runs, each rank takes some heads of all positions, as in DeepSpeed-Ulysses (arXiv 2309.14509).
If the heads do not divide, every rank computes all of them and keeps its positions.

Axes: N positions of a context rank, M of all, G groups of heads, D width of a group.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RowShare:
    context_ranks: int = 1
    context_rank: int = 0
    tensor_ranks: int = 1
    """Tensor ranks, which share a context rank's positions (sequence parallelism)."""

    def pad_row(self, length: int) -> int:
        """Return a row's padded length, which all context ranks share equally."""
        return -(-length // self._row_unit) * self._row_unit

    def pad(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the rows' padded lengths; the last row also pads for the tensor ranks."""
        padded = [self.pad_row(length) for length in lengths]
        # Tensor ranks share the positions of each context rank equally.
        whole_unit = math.lcm(self._row_unit, self.context_ranks * self.tensor_ranks)
        padded[-1] += -sum(padded) % whole_unit
        return tuple(padded)

    def positions(self, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return the positions of all rows that this rank holds, in its order."""
        return own_positions(lengths, self.context_ranks, self.context_rank)

    @property
    def _row_unit(self) -> int:
        return 1 if self.context_ranks == 1 else 2 * self.context_ranks


@dataclass(frozen=True, slots=True)
class Forest:
    """Packed rows with shared prefixes."""

    lengths: tuple[int, ...]
    """Padded positions of each row's segment; none is empty, and their sum is M."""
    shared: tuple[int, ...]
    """Positions at the beginning of each row that the row before it has, too."""

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths[:-1]))

    def depths(self) -> torch.Tensor:
        """Return each of the M positions' distance from the start of its row."""
        pairs = zip(self.shared, self.lengths, strict=True)
        return torch.cat([torch.arange(depth, depth + length) for depth, length in pairs])

    def paths(self) -> list[torch.Tensor]:
        """Return the positions, of M, of each whole row, padding included."""
        return row_paths(self.lengths, self.shared)


def row_paths(lengths: Sequence[int], shared: Sequence[int]) -> list[torch.Tensor]:
    """Return the positions, of M, of each whole row, padding included."""
    paths, start, path = [], 0, torch.arange(0)
    for length, depth in zip(lengths, shared, strict=True):
        path = torch.cat([path[:depth], torch.arange(start, start + length)])
        paths.append(path)
        start += length
    return paths


def take(
    x: torch.Tensor, places: torch.Tensor, inverse: torch.Tensor | None = None
) -> torch.Tensor:
    """Select along the first axis; gradients of a place selected several times add up in fp32.

    If `places` has every place once, its `inverse` orders the gradients back without a sum.
    """
    out: torch.Tensor = _Take.apply(x, places, inverse)  # type: ignore[no-untyped-call]
    return out


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, places: torch.Tensor, inverse: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(places, inverse)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,), (places, inverse) = grads, ctx.saved_tensors
        if inverse is not None:
            return grad.index_select(0, inverse), None, None
        wide = grad.new_zeros(ctx.length, *grad.shape[1:], dtype=torch.float32)
        return wide.index_add_(0, places, grad.float()).to(grad.dtype), None, None


def own_positions(lengths: tuple[int, ...], num_ranks: int, rank: int) -> torch.Tensor:
    """Return the positions of the whole pack that a context rank holds, row by row.

    `lengths` are padded: with several ranks they are multiples of 2 * num_ranks.
    """
    if num_ranks == 1:
        return torch.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        piece = length // (2 * num_ranks)
        for number in (rank, 2 * num_ranks - 1 - rank):
            parts.append(torch.arange(piece) + start + number * piece)
        start += length
    return torch.cat(parts)


@lru_cache(maxsize=16)
def whole_order(
    lengths: tuple[int, ...], num_ranks: int, device: torch.device = _HOST
) -> torch.Tensor:
    """Return `order` such that `torch.cat(parts)[order]` is the whole pack, parts in rank order."""
    return torch.argsort(held_order(lengths, num_ranks).to(device))


@lru_cache(maxsize=16)
def held_order(
    lengths: tuple[int, ...], num_ranks: int, device: torch.device = _HOST
) -> torch.Tensor:
    """Return the inverse of `whole_order`: the positions of all ranks, in rank order."""
    orders = [own_positions(lengths, num_ranks, rank) for rank in range(num_ranks)]
    return torch.cat(orders).to(device)


def gather_context(part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Concatenate all context ranks' parts, of one shape, along their first axis.

    A part's gradient is the sum of all ranks' gradients for it.
    """
    out: torch.Tensor = _GatherContext.apply(part, group)  # type: ignore[no-untyped-call]
    return out


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, group: torch.distributed.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        out = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        torch.distributed.all_gather_into_tensor(out, part.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Switch between own positions of all heads and own heads of all positions."""

    lengths: tuple[int, ...]
    """Padded lengths of the rows."""
    num_groups: int
    """Groups of heads of this rank's matrices; a group is never split."""

    @property
    def groups(self) -> slice:
        """The groups that this rank computes between `to_whole` and `to_own`."""
        group = _group()
        if not self._divides:
            return slice(0, self.num_groups)
        size = self.num_groups // group.size()
        return slice(group.rank() * size, (group.rank() + 1) * size)

    def to_whole(self, x_NGD: torch.Tensor) -> torch.Tensor:
        """Exchange all groups at own positions for own groups at all positions, row by row."""
        group = _group()
        if group.size() == 1:
            return x_NGD
        # Cached on the device: a copy from the host would stall every layer.
        order = whole_order(self.lengths, group.size(), x_NGD.device)
        back = held_order(self.lengths, group.size(), x_NGD.device)
        if not self._divides:
            return take(gather_context(x_NGD, group), order, back)
        count, width = len(x_NGD), x_NGD.shape[-1]
        # One slice of groups for each receiving rank.
        by_rank = x_NGD.reshape(count, group.size(), -1, width).transpose(0, 1).contiguous()
        received: torch.Tensor = all_to_all(group, by_rank)
        return take(received.flatten(0, 1), order, back)

    def to_own(self, y_MGD: torch.Tensor) -> torch.Tensor:
        """Exchange own groups at all positions for all groups at own positions."""
        group = _group()
        if group.size() == 1:
            return y_MGD
        if not self._divides:
            # Every rank has computed all groups, so it only selects its positions.
            own = own_positions(self.lengths, group.size(), group.rank())
            return y_MGD[own.to(y_MGD.device)]
        # Back from row order to the order in which the ranks hold positions.
        order = held_order(self.lengths, group.size(), y_MGD.device)
        back = whole_order(self.lengths, group.size(), y_MGD.device)
        by_rank = take(y_MGD, order, back).reshape(group.size(), -1, *y_MGD.shape[1:])
        received: torch.Tensor = all_to_all(group, by_rank)
        return received.transpose(0, 1).flatten(1, 2)

    @property
    def _divides(self) -> bool:
        return self.num_groups % _group().size() == 0


def _group() -> torch.distributed.ProcessGroup:
    group: torch.distributed.ProcessGroup = parallel_state.get_context_parallel_group()
    return group
