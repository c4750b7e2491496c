"""Attention row by row against attention written out, also through a variable-length kernel."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from swerl.training.rank import attention as row_attention
from swerl.training.rank.attention import attend, varlen

ROWS = [((5, 3, 1), (5, 3, 1)), ((4, 2), (9, 7))]
"""Lengths of queries and of keys: as many, or queries that come after more keys."""


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
) -> torch.Tensor:
    """Return softmax(q k / sqrt(d)) v over the keys that a query sees, one query at a time."""
    out, first_query, first_key = torch.zeros_like(query), 0, 0
    group = query.shape[1] // key.shape[1]
    for num_queries, num_keys in zip(query_lengths, key_lengths, strict=True):
        for number in range(num_queries):
            seen = slice(first_key, first_key + num_keys - num_queries + number + 1)
            for head in range(query.shape[1]):
                q = query[first_query + number, head]
                scores = key[seen, head // group] @ q / q.shape[0] ** 0.5
                out[first_query + number, head] = scores.softmax(0) @ value[seen, head // group]
        first_query, first_key = first_query + num_queries, first_key + num_keys
    return out


def _tensors(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(sum(query_lengths), 4, 8)
    return [query, *(torch.randn(sum(key_lengths), 2, 8) for _ in range(2))]


@pytest.mark.parametrize("queries", [512, 3])
@pytest.mark.parametrize("lengths", ROWS)
def test_rows_attend_to_earlier_positions_and_to_no_other_row(
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    queries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_attention, "_QUERIES", queries)
    tensors = _tensors(*lengths)
    torch.testing.assert_close(attend(*tensors, *lengths), _written_out(*tensors, *lengths))


def _like_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Stand in for torch.nn.attention.varlen.varlen_attn, by its documented contract."""
    assert (window_size, enable_gqa, scale) == ((-1, 0), True, None)
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    queries, keys = (
        tuple(end - start for start, end in pairwise(bounds.tolist()))
        for bounds in (cu_seq_q, cu_seq_k)
    )
    assert (max(queries), max(keys)) == (max_q, max_k)
    return _written_out(query, key, value, queries, keys)


@pytest.mark.parametrize("lengths", ROWS)
def test_a_variable_length_kernel_gets_each_rows_bounds(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _like_varlen_attn)
    row_attention.installed_kernel.cache_clear()
    kernel = row_attention.installed_kernel()
    row_attention.installed_kernel.cache_clear()
    tensors = _tensors(*lengths)
    assert kernel is not None
    torch.testing.assert_close(
        varlen(kernel, *tensors, *lengths, None), _written_out(*tensors, *lengths)
    )


FLASH3 = """
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
class Fake:
    fwd = bwd = staticmethod(lambda *_: None)
torch.ops.flash_attn_3 = Fake()
"""


@pytest.mark.parametrize(("installed", "chosen"), [(True, "FA3"), (False, None)])
def test_flash_attention_3_is_used_where_it_is_installed(
    installed: bool, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        (tmp_path / "flash_attn_interface.py").write_text(FLASH3)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    row_attention.installed_kernel.cache_clear()
    try:
        assert row_attention.installed_kernel() is not None
        # torch's own registry loads the package, and reports what it dispatches to.
        assert current_flash_attention_impl() == chosen
    finally:
        row_attention.installed_kernel.cache_clear()
        if current_flash_attention_impl():
            restore_flash_attention_impl()
