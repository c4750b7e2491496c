"""Attention on packed rows, which Megatron's local layer specification does not support.

Rows lie end to end and never attend to each other. If context ranks share the rows (context.py),
every rank gathers the keys and values of all ranks. Its queries of a row, an early and a late
piece, attend to all positions before them.

In half precision on CUDA one kernel call attends all rows: torch's variable-length FlashAttention,
with the kernels of FlashAttention 3 where they are installed, or flash-attn's if torch's has no
grouped queries. Otherwise scaled dot-product attention takes one row after the other.

Axes: N positions of a context rank, M positions of all of them, heads, head_dim.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from swerl.training.rank.context import gather_context, whole_order

_CAUSAL = (-1, 0)
"""Window of torch's kernel: all keys up to the query's own position."""
_HOPPER = 9
"""Major compute capability of H100 and H200."""


class PackedAttention(torch.nn.Module):
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
        # Without context ranks, a row's queries and keys have the same positions.
        if group.size() == 1:
            return attend(query, key, value, lengths, lengths, self.scale).flatten(1)
        # One exchange carries keys and values.
        both = gather_context(torch.stack((key, value), dim=1), group)
        parts = []
        # Cached: all layers of a pass see the same rows.
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
        # Each piece has parts of all rows; put the positions back in this rank's order.
        return torch.cat(parts)[plan.order].flatten(1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One query piece of every row, and the keys that its queries attend to."""

    queries: torch.Tensor
    """Indices among this rank's positions."""
    keys: torch.Tensor
    """Indices among all ranks' gathered parts."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pieces:
    pieces: tuple[_Piece, _Piece]
    order: torch.Tensor
    """Sorts both pieces' queries, end to end, into the order of this rank's positions."""


@lru_cache(maxsize=8)
def _pieces(lengths: tuple[int, ...], num_ranks: int, rank: int, device: torch.device) -> _Pieces:
    """Return the early and the late piece; `lengths` are of whole, padded rows."""
    sizes = tuple(length // (2 * num_ranks) for length in lengths)
    order = whole_order(lengths, num_ranks)
    # This rank holds two pieces of every row, one after the other.
    own_starts = [0, *accumulate(2 * size for size in sizes[:-1])]
    starts = [0, *accumulate(lengths[:-1])]
    found = []
    for half, number in enumerate((rank, 2 * num_ranks - 1 - rank)):
        # A piece sees the keys of all pieces up to itself.
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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None = None,
) -> torch.Tensor:
    """Attend row by row: a row's last query attends to all its keys, the one before to all but one.

    Shapes: queries (queries, heads, head_dim), keys and values (keys, groups, head_dim); the result
    has the queries' shape.
    """
    # The kernels compute in half precision only.
    kernel = installed_kernel() if query.is_cuda and query.dtype is not torch.float32 else None
    if kernel is None:
        rows = zip(
            torch.split(query, list(query_lengths)),
            torch.split(key, list(key_lengths)),
            torch.split(value, list(key_lengths)),
            strict=True,
        )
        return torch.cat([_row(*row, scale) for row in rows])
    return varlen(kernel, query, key, value, query_lengths, key_lengths, scale)


def varlen(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None,
) -> torch.Tensor:
    """Attend all rows in one call of a kernel that takes each row's bounds."""
    out: torch.Tensor = kernel(
        query,
        key,
        value,
        _bounds(query_lengths, query.device),
        _bounds(key_lengths, query.device),
        max(query_lengths),
        max(key_lengths),
        scale=scale,
    )
    return out


@lru_cache(maxsize=1)
def installed_kernel() -> Callable[..., Any] | None:
    """Return the installed variable-length kernel, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        # Without grouped queries, the kernel requires one key head for each query head.
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            _prefer_flash3()
            return partial(varlen_attn, window_size=_CAUSAL, enable_gqa=True)
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None
    return lambda *inputs, scale: flash_attn_varlen_func(*inputs, softmax_scale=scale, causal=True)


def _prefer_flash3() -> None:
    """Let torch's attention run FlashAttention 3 on GPUs that it is written for: Hopper alone."""
    if find_spec("flash_attn_interface") and torch.cuda.get_device_capability()[0] == _HOPPER:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")


def _row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    # `is_causal` aligns queries with the first keys; a late piece must end with the last key.
    square = query.shape[0] == key.shape[0]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=None if square else _lower_right(query.shape[0], key.shape[0], query.device),
        is_causal=square,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _lower_right(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)


@lru_cache(maxsize=8)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
