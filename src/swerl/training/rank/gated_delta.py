"""The gated delta net of Qwen3-Next, Qwen3.5 and Qwen3.6, on packed rows under every split.

Megatron-Core's own takes neither packed rows nor context ranks. Tensor ranks share key heads, each
with the value heads that read it; the projection's rows are grouped so. Context ranks share the
heads once more while the rule runs along whole rows.

Axes: N positions of a context rank, M of all, G key heads of this rank, r value heads of each, W
window of the convolution.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from swerl.training.rank.delta_rule import causal_conv, gated_delta_rule
from swerl.training.rank.head_exchange import HeadExchange


class GatedDeltaNet(torch.nn.Module):
    """Stands where a transformer layer has its attention."""

    def __init__(self, config: TransformerConfig, layer_number: int, **unused: object) -> None:
        super().__init__()
        self.layer_number = layer_number
        self._ratio = config.linear_num_value_heads // config.linear_num_key_heads
        self._key, self._value = config.linear_key_head_dim, config.linear_value_head_dim
        self._epsilon = config.layernorm_epsilon
        tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._groups = config.linear_num_key_heads // tensor_ranks
        values = config.linear_num_value_heads * self._value
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            config.linear_num_key_heads * sum(self._parts),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
        )
        self.out_proj = RowParallelLinear(
            values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        dtype, heads = config.params_dtype, self._groups * self._ratio
        channels = self._groups * self._parts[0]
        window = config.linear_conv_kernel_dim
        self.conv_weight = _shared(torch.empty(channels, window, dtype=dtype))
        # What decays go through twice an exponential: kept in fp32, also where the model is bf16.
        self.A_log = _shared(torch.zeros(heads))
        self.dt_bias = _shared(torch.ones(heads, dtype=dtype))
        self.norm_weight = torch.nn.Parameter(torch.ones(self._value, dtype=dtype))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Mix each row's positions: (N, 1, hidden) in and out, N / ranks between tensor ranks."""
        projected_N1D, _ = self.in_proj(hidden_states)
        grouped_NGD = projected_N1D.reshape(len(projected_N1D), self._groups, -1)
        mixed_NGD, gate_NGD, beta_NGr, decay_NGr = torch.split(grouped_NGD, self._parts, dim=-1)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        exchange = HeadExchange(tuple(b - a for a, b in pairwise(bounds)), self._groups)
        whole_MGD = exchange.to_whole(torch.cat([mixed_NGD, beta_NGr, decay_NGr], dim=-1))
        out_NGD = exchange.to_own(self._along_rows(whole_MGD, bounds, exchange.groups))
        out_NHV = self._norm(
            out_NGD.reshape(-1, self._groups * self._ratio, self._value),
            gate_NGD.reshape(-1, self._groups * self._ratio, self._value),
        )
        out_N1H, _ = self.out_proj(out_NHV.flatten(1).unsqueeze(1))
        return out_N1H, None

    @property
    def _parts(self) -> list[int]:
        """Widths of a key head's part of the projection: mixed, gates, betas, decays."""
        values = self._ratio * self._value
        return [2 * self._key + values, values, self._ratio, self._ratio]

    def _along_rows(
        self, whole_MGD: torch.Tensor, bounds: list[int], groups: slice
    ) -> torch.Tensor:
        """Convolve and apply the rule: the mixed part, betas and decays of some groups in."""
        width, _, ratio, _ = self._parts
        mixed, beta, decay = torch.split(whole_MGD, [width, ratio, ratio], dim=-1)
        window = self.conv_weight.shape[-1]
        weight = self.conv_weight.reshape(self._groups, width, window)[groups].flatten(0, 1)
        mixed = causal_conv(mixed.flatten(1), weight, bounds).reshape(len(mixed), -1, width)
        query, key, value = torch.split(mixed, [self._key, self._key, ratio * self._value], dim=-1)
        A_log, dt_bias = (
            part.reshape(self._groups, ratio)[groups].flatten().float()
            for part in (self.A_log, self.dt_bias)
        )
        out_MHV = gated_delta_rule(
            query.repeat_interleave(ratio, dim=1),
            key.repeat_interleave(ratio, dim=1),
            value.reshape(len(value), -1, self._value),
            log_decay_MH=-A_log.exp() * F.softplus(decay.flatten(1).float() + dt_bias),
            beta_MH=beta.flatten(1).float().sigmoid(),
            bounds=bounds,
        )
        return out_MHV.reshape(len(out_MHV), -1, ratio * self._value)

    def _norm(self, out_NHV: torch.Tensor, gate_NHV: torch.Tensor) -> torch.Tensor:
        """Normalise by head and gate (arXiv 2412.06464, figure 1)."""
        wide = out_NHV.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        # Tensor ranks see their own heads only: their gradients for this weight must be summed.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight)
        normed = weight * scaled.to(out_NHV.dtype)
        gated: torch.Tensor = (normed * F.silu(gate_NHV.float())).to(out_NHV.dtype)
        return gated


def _shared(value: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter of which each tensor rank holds its heads' part."""
    parameter = torch.nn.Parameter(value)
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return parameter
