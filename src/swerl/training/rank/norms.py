"""Norms of the model in training, which know of sequence parallelism."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in fp32 (Zhang and Sennrich 2019, eq. 4).

    Where the config's gammas are centred at zero (Qwen3.5), the weight is what is added to one.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.adds_one = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.adds_one:
            return (wide * scale * (1.0 + self.weight.float())).to(x.dtype)
        return (wide * scale).to(x.dtype) * self.weight
