"""Attention on packed rows: Megatron's local layer spec refuses them, so this file brings its own.

Rows lie end to end and never see each other. Where context ranks share the rows (context.py), every
rank gathers the keys and values of all, and its queries of a row, an early and a late piece, each
attend what lies before them.

Axes: N positions of a context rank, M positions of all of them, heads, head_dim.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from swerl.training.rank.context import whole_order
from swerl.training.rank.row_attention import attend


class PackedAttention(torch.nn.Module):
    """Causal grouped-query attention, row by row."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **unused: object
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **unused: object,
    ) -> torch.Tensor:
        """Attend within rows: (N, heads, head_dim) in, (N, heads * head_dim) out."""
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = tuple(end - start for start, end in pairwise(bounds))
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return attend(query, key, value, lengths, lengths, self.scale).flatten(1)
        both = gather_context(torch.stack((key, value), dim=1), group)
        parts = []
        plan = _pieces(lengths, group.size(), group.rank(), query.device)
        for piece in plan.pieces:
            key_M, value_M = both[piece.keys].unbind(1)
            parts.append(
                attend(
                    query[piece.queries],
                    key_M,
                    value_M,
                    piece.query_lengths,
                    piece.key_lengths,
                    self.scale,
                )
            )
        return torch.cat(parts)[plan.order].flatten(1)


def gather_context(part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Return all context ranks' parts, of one shape, end to end along their first axis.

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
class _Piece:
    """One query piece of every row, and the keys that its queries see."""

    queries: torch.Tensor
    """Among this rank's positions."""
    keys: torch.Tensor
    """Among all ranks' gathered parts."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pieces:
    pieces: tuple[_Piece, _Piece]
    order: torch.Tensor
    """Brings both pieces' queries, end to end, into the order of this rank's positions."""


@lru_cache(maxsize=8)
def _pieces(lengths: tuple[int, ...], num_ranks: int, rank: int, device: torch.device) -> _Pieces:
    """Return the early and the late piece; `lengths` are those of the whole, padded rows."""
    sizes = tuple(length // (2 * num_ranks) for length in lengths)
    order = whole_order(lengths, num_ranks)
    own_starts = [0, *accumulate(2 * size for size in sizes[:-1])]
    starts = [0, *accumulate(lengths[:-1])]
    found = []
    for half, number in enumerate((rank, 2 * num_ranks - 1 - rank)):
        seen = tuple((number + 1) * size for size in sizes)
        begins = [start + half * size for start, size in zip(own_starts, sizes, strict=True)]
        queries = _ranges(begins, sizes)
        keys = order[_ranges(starts, seen)]
        found.append(_Piece(queries.to(device), keys.to(device), sizes, seen))
    early, late = found
    back = torch.argsort(torch.cat([early.queries, late.queries]))
    return _Pieces((early, late), back)


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    pairs = zip(starts, lengths, strict=True)
    return torch.cat([torch.arange(start, start + length) for start, length in pairs])
