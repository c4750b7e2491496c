"""Swaps how context ranks share a layer's work: by positions, or by heads with whole rows.

Layers that run along a row, such as a gated delta net, cannot start in its middle. So each rank
takes some heads of all positions for as long as such a layer runs, as DeepSpeed-Ulysses does (arXiv
2309.14509). Where heads do not divide, every rank computes all of them and keeps its positions.

Axes: N positions of a context rank, M of all, G groups of heads, D width of a group.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all

from swerl.training.rank.attention import gather_context
from swerl.training.rank.context import own_positions, whole_order


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The swap for rows of these padded lengths."""

    lengths: tuple[int, ...]
    num_groups: int
    """Groups of heads that this rank's matrices make, of which no group is torn apart."""

    @property
    def groups(self) -> slice:
        """Which of the groups this rank computes between `to_whole` and `to_own`."""
        if not self._divides:
            return slice(0, self.num_groups)
        size = self.num_groups // _num_ranks()
        return slice(_rank() * size, (_rank() + 1) * size)

    def to_whole(self, x_NGD: torch.Tensor) -> torch.Tensor:
        """Turn all groups at own positions into own groups at all positions, row by row."""
        num_ranks = _num_ranks()
        if num_ranks == 1:
            return x_NGD
        order = whole_order(self.lengths, num_ranks).to(x_NGD.device)
        if not self._divides:
            return gather_context(x_NGD, _group())[order]
        count, width = len(x_NGD), x_NGD.shape[-1]
        by_rank = x_NGD.reshape(count, num_ranks, -1, width).transpose(0, 1).contiguous()
        received: torch.Tensor = all_to_all(_group(), by_rank)
        return received.flatten(0, 1)[order]

    def to_own(self, y_MGD: torch.Tensor) -> torch.Tensor:
        """Turn own groups at all positions into all groups at own positions."""
        num_ranks = _num_ranks()
        if num_ranks == 1:
            return y_MGD
        if not self._divides:
            return y_MGD[own_positions(self.lengths, num_ranks, _rank()).to(y_MGD.device)]
        order = whole_order(self.lengths, num_ranks).to(y_MGD.device)
        ordered = y_MGD[torch.argsort(order)]
        by_rank = ordered.reshape(num_ranks, -1, *y_MGD.shape[1:])
        received: torch.Tensor = all_to_all(_group(), by_rank)
        return received.transpose(0, 1).flatten(1, 2)

    @property
    def _divides(self) -> bool:
        return self.num_groups % _num_ranks() == 0


def _group() -> torch.distributed.ProcessGroup:
    group: torch.distributed.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def _num_ranks() -> int:
    return int(parallel_state.get_context_parallel_world_size())


def _rank() -> int:
    return int(parallel_state.get_context_parallel_rank())
