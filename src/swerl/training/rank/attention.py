"""Attention on packed rows, which Megatron's local layer specification does not support.

Rows lie end to end and never attend to each other. If context ranks share the rows (context.py),
every rank gathers the keys and values of all ranks. Its queries of a row, an early and a late
piece, attend to all positions before them. If rows share prefixes, a segment's queries attend to
the keys of its whole path.

In half precision on CUDA one kernel call attends all rows: torch's variable-length FlashAttention,
with the kernels of FlashAttention 3 where they are installed. Otherwise scaled dot-product
attention takes one row after the other.

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
from torch.utils.checkpoint import checkpoint

from swerl.plan.activations import SHARED_COPIES
from swerl.training.rank.context import Forest, gather_context, take, whole_order

_CAUSAL = (-1, 0)
"""Window of torch's kernel: all keys up to the query's own position."""
_QUERIES = 512
"""Queries under one mask: half of them times as many keys are computed and thrown away."""
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
        forest: Forest | None = getattr(packed_seq_params, "forest", None)
        group = parallel_state.get_context_parallel_group()
        # A row's queries and keys then have the same positions.
        if group.size() == 1 and forest is None:
            return attend(query, key, value, lengths, lengths, self.scale).flatten(1)
        # One exchange carries keys and values.
        both = torch.stack((key, value), dim=1)
        if group.size() > 1:
            both = gather_context(both, group)
        # Cached: all layers of a pass see the same rows.
        shares = forest is not None
        forest = forest or Forest(lengths, (0,) * len(lengths))
        plan = _pieces(forest, group.size(), group.rank(), query.device)
        # Each piece has parts of several rows.
        queries = take(query, plan.queries, plan.order)
        own = torch.split(queries, [sum(piece.query_lengths) for piece in plan.pieces])
        parts = [
            self._piece(piece, query, both, shares, plan.again)
            for piece, query in zip(plan.pieces, own, strict=True)
        ]
        # Put the positions back in this rank's order.
        return take(torch.cat(parts), plan.order, plan.queries).flatten(1)

    def _piece(
        self, piece: _Piece, query: torch.Tensor, both: torch.Tensor, shares: bool, again: bool
    ) -> torch.Tensor:
        def run(query: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
            picked = take(both, piece.keys) if shares else both.index_select(0, piece.keys)
            key_M, value_M = picked.unbind(1)
            lengths = piece.query_lengths, piece.key_lengths
            return attend(query, key_M, value_M, *lengths, self.scale)

        if again and torch.is_grad_enabled():
            piece_out: torch.Tensor = checkpoint(run, query, both, use_reentrant=False)
            return piece_out
        return run(query, both)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One query piece of several rows, and the keys that its queries attend to."""

    keys: torch.Tensor
    """Indices among all ranks' gathered parts."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pieces:
    pieces: tuple[_Piece, ...]
    queries: torch.Tensor
    """Indices, among this rank's positions, of all pieces' queries, end to end."""
    order: torch.Tensor
    """The inverse of `queries`."""
    again: bool
    """Whether the backward pass gathers a piece's keys again. Copies of a prefix for each of many
    rows would not fit in memory together."""


@lru_cache(maxsize=8)
def _pieces(forest: Forest, num_ranks: int, rank: int, device: torch.device) -> _Pieces:
    """Return an early and a late piece of all rows, or several with a part of the rows each."""
    # Without context ranks, a segment is one piece.
    num_pieces = 2 * num_ranks if num_ranks > 1 else 1
    numbers = (rank, num_pieces - 1 - rank)[: min(num_pieces, 2)]
    sizes = [length // num_pieces for length in forest.lengths]
    order = whole_order(forest.lengths, num_ranks)
    paths = forest.paths()
    # This rank holds its pieces of a row one after the other.
    own_starts = [0, *accumulate(len(numbers) * size for size in sizes[:-1])]
    found, queries = [], []
    for half, number in enumerate(numbers):
        # A piece sees its row's prefix and the keys of all pieces up to itself.
        seen = [(number + 1) * size for size in sizes]
        lengths = [depth + size for depth, size in zip(forest.shared, seen, strict=True)]
        for rows in _by_keys(lengths, limit=SHARED_COPIES * sum(forest.lengths)):
            begins = [own_starts[row] + half * sizes[row] for row in rows]
            queries.append(_ranges(begins, [sizes[row] for row in rows]))
            found.append(
                _Piece(
                    order[torch.cat([paths[row][: lengths[row]] for row in rows])].to(device),
                    tuple(sizes[row] for row in rows),
                    tuple(lengths[row] for row in rows),
                )
            )
    own = torch.cat(queries).to(device)
    return _Pieces(tuple(found), own, torch.argsort(own), again=len(found) > len(numbers))


def _by_keys(lengths: Sequence[int], *, limit: int) -> list[list[int]]:
    """Group neighbouring rows so that each group has at most `limit` keys, or one row."""
    groups: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = limit
        groups[-1].append(row)
        room -= length
    return groups


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
    if query.is_cuda and query.dtype is not torch.float32:
        return varlen(installed_kernel(), query, key, value, query_lengths, key_lengths, scale)
    lengths = map(list, (query_lengths, key_lengths, key_lengths))
    rows = zip(*map(torch.split, (query, key, value), lengths), strict=True)
    return torch.cat([_row(q, k, v, scale) for q, k, v in rows])


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
    bounds = (_bounds(lengths, query.device) for lengths in (query_lengths, key_lengths))
    longest = max(query_lengths), max(key_lengths)
    out: torch.Tensor = kernel(query, key, value, *bounds, *longest, scale=scale)
    return out


@lru_cache(maxsize=1)
def installed_kernel() -> Callable[..., Any]:
    """Return torch's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    _prefer_flash3()
    # Before this option came, grouped queries needed none.
    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if has_option else {}
    return partial(varlen_attn, window_size=_CAUSAL, **options)


def _prefer_flash3() -> None:
    """Let torch's attention run FlashAttention 3 on GPUs that it is written for: Hopper alone."""
    if find_spec("flash_attn_interface") and torch.cuda.get_device_capability()[0] == _HOPPER:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")


def _row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    call = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    num, before = q.shape[2], k.shape[2] - q.shape[2]
    if not before:
        return call(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)
    # `is_causal` aligns queries with the first keys, and a mask computes what it hides: some
    # queries at a time leave out the keys after them.
    parts = []
    for start in range(0, num, _QUERIES):
        end = min(start + _QUERIES, num)
        end_of_keys = before + end
        mask = q.new_ones(end - start, end_of_keys, dtype=torch.bool).tril(before + start)
        parts.append(
            call(q[:, :, start:end], k[:, :, :end_of_keys], v[:, :, :end_of_keys], attn_mask=mask)
        )
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)


@lru_cache(maxsize=8)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
