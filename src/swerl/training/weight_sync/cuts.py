"""How an engine cuts a tensor among its tensor-parallel ranks: what each of them holds.

Every function returns one tensor a rank, or None where the tensor does not divide so.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence

import torch

Cut = list[torch.Tensor]
"""What each rank holds."""


def whole(tensor: torch.Tensor, num_ranks: int) -> Cut:
    """Every rank holds all of it."""
    return [tensor] * num_ranks


def along(tensor: torch.Tensor, num_ranks: int, dim: int) -> Cut | None:
    """Each rank holds its share of one dimension."""
    if tensor.ndim < abs(dim) or tensor.shape[dim] % num_ranks:
        return None
    return [part.contiguous() for part in tensor.chunk(num_ranks, dim)]


def padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Fill one dimension up with zeros."""
    missing = size - tensor.shape[dim]
    return torch.nn.functional.pad(tensor.movedim(dim, -1), (0, missing)).movedim(-1, dim)


def heads(tensor: torch.Tensor, num_ranks: int, num_heads: int) -> Cut | None:
    """Each rank holds the rows of its heads; fewer heads than ranks are held by several each."""
    if num_heads >= num_ranks:
        return None if num_heads % num_ranks else along(tensor, num_ranks, 0)
    if num_ranks % num_heads:
        return None
    parts = along(tensor, num_heads, 0)
    return parts and [parts[rank * num_heads // num_ranks] for rank in range(num_ranks)]


def stacked(cuts: Sequence[Cut | None], dim: int = 0) -> Cut | None:
    """Each rank holds its share of every part, one after the other."""
    found = [cut for cut in cuts if cut is not None]
    if len(found) < len(cuts):
        return None
    return [torch.cat(parts, dim) for parts in zip(*found, strict=True)]
