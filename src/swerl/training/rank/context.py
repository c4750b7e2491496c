"""Where the positions of packed rows lie when context ranks share them, in zigzag order.

Each row is padded at its end and cut into twice as many equal pieces as there are context ranks.
Rank r holds the pieces r and 2 * ranks - 1 - r: a cheap early one and a dear late one, so that
causal attention costs every rank the same (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of every row one rank holds."""

    context_ranks: int = 1
    context_rank: int = 0
    tensor_ranks: int = 1
    """Ranks that share the positions of a context rank between their matrices."""

    def pad_row(self, length: int) -> int:
        """Return a row's padded length: all context ranks hold as much of it."""
        return -(-length // self._row_unit) * self._row_unit

    def pad(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the rows' padded lengths; the last row also evens out the tensor ranks."""
        padded = [self.pad_row(length) for length in lengths]
        whole_unit = math.lcm(self._row_unit, self.context_ranks * self.tensor_ranks)
        padded[-1] += -sum(padded) % whole_unit
        return tuple(padded)

    def positions(self, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return the positions of all rows' that this rank holds, in its order."""
        return own_positions(lengths, self.context_ranks, self.context_rank)

    @property
    def _row_unit(self) -> int:
        return 1 if self.context_ranks == 1 else 2 * self.context_ranks


def own_positions(lengths: tuple[int, ...], num_ranks: int, rank: int) -> torch.Tensor:
    """Return the positions of the whole pack that a context rank holds, row by row.

    `lengths` are padded: multiples of 2 * num_ranks where there are several ranks.
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
def whole_order(lengths: tuple[int, ...], num_ranks: int) -> torch.Tensor:
    """Return `order` such that `torch.cat(parts)[order]` is the whole pack, parts in rank order."""
    held = torch.cat([own_positions(lengths, num_ranks, rank) for rank in range(num_ranks)])
    return torch.argsort(held)
