"""Attention row by row, in one kernel call where there is one for rows of any length.

In half precision on CUDA that is torch's variable-length FlashAttention, or flash-attn's where
torch's knows no grouped queries. Else scaled dot-product attention takes one row after the other.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None = None,
) -> torch.Tensor:
    """Attend row by row: the last query of a row sees all its keys, the one before all but one.

    (queries, heads, head_dim) and (keys, groups, head_dim) in, shaped like the queries out.
    """
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
    kernel: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float | None,
) -> torch.Tensor:
    """Attend all rows in one call of a kernel that takes each row's start and end."""
    return kernel(
        query,
        key,
        value,
        _bounds(query_lengths, query.device),
        _bounds(key_lengths, query.device),
        max(query_lengths),
        max(key_lengths),
        scale,
    )


@lru_cache(maxsize=1)
def installed_kernel() -> Callable[..., torch.Tensor] | None:
    """Return the variable-length kernel that is installed."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            return partial(_torch_varlen, varlen_attn)
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None
    return partial(_flash_attn, flash_attn_varlen_func)


def _torch_varlen(function: Callable[..., Any], *inputs: Any) -> torch.Tensor:
    *tensors, scale = inputs
    causal = (-1, 0)
    out: torch.Tensor = function(*tensors, scale=scale, window_size=causal, enable_gqa=True)
    return out


def _flash_attn(function: Callable[..., Any], *inputs: Any) -> torch.Tensor:
    *tensors, scale = inputs
    out: torch.Tensor = function(*tensors, softmax_scale=scale, causal=True)
    return out


def _row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
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
