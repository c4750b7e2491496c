"""Attention on packed rows: Megatron's local layer spec refuses them, so this file brings its own.

Axes: N tokens of all rows of a micro-batch.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig


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
        lengths = [end - start for start, end in pairwise(bounds)]
        rows = zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True)
        return torch.cat([self._row(*row) for row in rows]).flatten(1)

    def _row(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.squeeze(0).transpose(0, 1)
