"""The gated delta net of Qwen3-Next, Qwen3.5 and Qwen3.6, on packed rows and any layout.

Megatron-Core has packed rows and context ranks for it since 0.18, and no shared prefixes; this
layer is also the reference in fp32 on a CPU. Tensor ranks share key heads, each with its value
heads; the projection's rows are grouped accordingly. Context ranks share the heads again while the
rule runs along whole rows.

State and arithmetic are fp32 for any input type, and start at zero in every row. If rows share
prefixes, the pack is cut into nodes where a row branches off; a node starts with its parent's last
state, and autograd sums its children's gradients there. On CUDA the kernels of
flash-linear-attention compute the rule, the convolution and the gated norm if they are installed;
the plain torch code is their reference.

Axes: N positions of a context rank, M of all, end to end; G key heads of this rank, r value heads
of each, W window of the convolution; T positions of one row, H heads, K key width, V value width, C
channels, B rows or nodes, n chunks, i and j positions within a chunk.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate, pairwise

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

from swerl.training.rank.context import Forest, HeadExchange, take

CHUNK = 64
"""Positions solved together; flash-linear-attention's kernels use the same number."""


class GatedDeltaNet(torch.nn.Module):
    """Takes the place of attention in a transformer layer."""

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
        # Decays pass through two exponentials, so A_log stays fp32 in a bf16 model.
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
        """Mix each row's positions: (N, 1, hidden) in and out; N / ranks per tensor rank."""
        # With sequence parallelism, the projection gathers the positions of all tensor ranks.
        projected_N1D, _ = self.in_proj(hidden_states)
        grouped_NGD = projected_N1D.reshape(len(projected_N1D), self._groups, -1)
        mixed_NGD, gate_NGD, beta_NGr, decay_NGr = torch.split(grouped_NGD, self._parts, dim=-1)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        exchange = HeadExchange(tuple(b - a for a, b in pairwise(bounds)), self._groups)
        # One exchange carries all inputs of the rule. Gates apply by position and stay.
        whole_MGD = exchange.to_whole(torch.cat([mixed_NGD, beta_NGr, decay_NGr], dim=-1))
        forest: Forest | None = getattr(packed_seq_params, "forest", None)
        out_NGD = exchange.to_own(self._along_rows(whole_MGD, bounds, forest, exchange.groups))
        out_NHV = gated_norm(
            out_NGD.reshape(-1, self._groups * self._ratio, self._value),
            gate_NGD.reshape(-1, self._groups * self._ratio, self._value),
            # Tensor ranks hold different heads, so their gradients of this weight are summed.
            copy_to_tensor_model_parallel_region(self.norm_weight),
            epsilon=self._epsilon,
        )
        out_N1H, _ = self.out_proj(out_NHV.flatten(1).unsqueeze(1))
        return out_N1H, None

    @property
    def _parts(self) -> list[int]:
        """Widths of a key head's part of the projection: mixed, gates, betas, decays."""
        values = self._ratio * self._value
        return [2 * self._key + values, values, self._ratio, self._ratio]

    def _along_rows(
        self, whole_MGD: torch.Tensor, bounds: list[int], forest: Forest | None, groups: slice
    ) -> torch.Tensor:
        """Convolve and apply the rule to the mixed part, betas and decays of some groups."""
        width, _, ratio, _ = self._parts
        mixed, beta, decay = torch.split(whole_MGD, [width, ratio, ratio], dim=-1)
        window = self.conv_weight.shape[-1]
        # The channels are grouped by key head, as the projection's rows are.
        weight = self.conv_weight.reshape(self._groups, width, window)[groups].flatten(0, 1)
        mixed = _conv(mixed.flatten(1), weight, bounds, forest).reshape(len(mixed), -1, width)
        query, key, value = torch.split(mixed, [self._key, self._key, ratio * self._value], dim=-1)
        A_log, dt_bias = (
            part.reshape(self._groups, ratio)[groups].flatten().float()
            for part in (self.A_log, self.dt_bias)
        )
        out_MHV = gated_delta_rule(
            query,
            key,
            value.reshape(len(value), -1, self._value),
            log_decay_MH=-A_log.exp() * F.softplus(decay.flatten(1).float() + dt_bias),
            beta_MH=beta.flatten(1).float().sigmoid(),
            bounds=bounds,
            forest=forest,
        )
        return out_MHV.reshape(len(out_MHV), -1, ratio * self._value)


def _shared(value: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(value)
    # Megatron splits a parameter with these attributes among tensor ranks.
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return parameter


def gated_delta_rule(
    query_MGK: torch.Tensor,
    key_MGK: torch.Tensor,
    value_MHV: torch.Tensor,
    *,
    log_decay_MH: torch.Tensor,
    beta_MH: torch.Tensor,
    bounds: Sequence[int],
    forest: Forest | None = None,
) -> torch.Tensor:
    """Return `out_MHV` of Gated Delta Networks (arXiv 2412.06464, eq. 10), row by row.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t, with
    queries and keys of length one and queries divided by the root of K. Each key head serves the
    same number of value heads, in turn. `bounds` are the rows' first positions and the end of the
    last.
    """
    whole = (query_MGK, key_MGK, value_MHV, log_decay_MH, beta_MH)
    rule = _by_kernels if query_MGK.is_cuda and has_kernels() else _in_turn
    if forest is None:
        return rule(whole, bounds)[0]
    # All nodes of a level run together, from the last states of the level before.
    plan = _nodes(forest, query_MGK.device)
    outs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for level in plan.levels:
        first = None if states is None else take(states, level.parents)
        parts = [part[level.places] for part in whole]
        out, states = rule(parts, level.bounds, first, keep=level is not plan.levels[-1])
        outs.append(out)
    return torch.cat(outs)[plan.order]


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes at the same number of branchings from their roots."""

    places: torch.Tensor
    """Positions, of M, of all nodes, end to end."""
    bounds: tuple[int, ...]
    """First of `places` of each node, and the end of the last."""
    parents: torch.Tensor
    """Index of each node's parent in the level before; empty in the first level."""


@dataclass(frozen=True, slots=True)
class _Nodes:
    levels: tuple[_Level, ...]
    order: torch.Tensor
    """Sorts the places of all levels, end to end."""


@lru_cache(maxsize=8)
def _nodes(forest: Forest, device: torch.device) -> _Nodes:
    """Cut segments where other rows branch off."""
    starts = forest.starts
    # The position before a segment's first one: -1 for a root.
    before = {
        start: int(path[depth - 1]) if depth else -1
        for start, path, depth in zip(starts, forest.paths(), forest.shared, strict=True)
    }
    cuts = sorted({*starts, *(place + 1 for place in before.values()), sum(forest.lengths)})
    # A node by its last position: its level, and its index there.
    found: dict[int, tuple[int, int]] = {}
    levels: list[list[tuple[int, int, int]]] = []
    for start, end in pairwise(cuts):
        # A cut within a segment continues the node before it.
        level, parent = found.get(before.get(start, start - 1), (-1, 0))
        if level + 1 == len(levels):
            levels.append([])
        found[end - 1] = level + 1, len(levels[level + 1])
        levels[level + 1].append((start, end, parent))
    plans = [
        _Level(
            torch.cat([torch.arange(start, end) for start, end, _ in nodes]).to(device),
            (0, *accumulate(end - start for start, end, _ in nodes)),
            torch.tensor([parent for _, _, parent in nodes], device=device),
        )
        for nodes in levels
    ]
    return _Nodes(tuple(plans), torch.argsort(torch.cat([plan.places for plan in plans])))


def _conv(
    x_MC: torch.Tensor, weight_CW: torch.Tensor, bounds: Sequence[int], forest: Forest | None
) -> torch.Tensor:
    """Convolve each row, with the end of its shared prefix before its segment."""
    if forest is None:
        return causal_conv(x_MC, weight_CW, bounds)
    places, own, bounds = _windows(forest, weight_CW.shape[1] - 1, x_MC.device)
    return causal_conv(take(x_MC, places), weight_CW, bounds)[own]


@lru_cache(maxsize=8)
def _windows(
    forest: Forest, back: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return the places of all segments, each after `back` of its prefix; own ones; bounds."""
    parts, own, bounds = [], [], [0]
    for path, depth in zip(forest.paths(), forest.shared, strict=True):
        window = path[max(depth - back, 0) :]
        own.append(torch.arange(bounds[-1] + min(depth, back), bounds[-1] + len(window)))
        parts.append(window)
        bounds.append(bounds[-1] + len(window))
    return torch.cat(parts).to(device), torch.cat(own).to(device), tuple(bounds)


def causal_conv(x_MC: torch.Tensor, weight_CW: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Return SiLU of the causal convolution, by channel and within each row."""
    if x_MC.is_cuda and has_kernels():
        return _conv_by_kernel(x_MC, weight_CW, bounds)
    place_M = _places(tuple(bounds), x_MC.device)
    wide, width = x_MC.float(), weight_CW.shape[1]
    total_MC = wide * weight_CW[:, -1].float()
    for back in range(1, min(width, len(x_MC))):
        # A shift must not read positions of the row before.
        shifted = F.pad(wide[:-back], (0, 0, back, 0)) * (place_M >= back).unsqueeze(1)
        total_MC = total_MC + shifted * weight_CW[:, -1 - back].float()
    return F.silu(total_MC).to(x_MC.dtype)


def gated_norm(
    out_NHV: torch.Tensor, gate_NHV: torch.Tensor, weight_V: torch.Tensor, *, epsilon: float
) -> torch.Tensor:
    """Normalise by head and multiply with SiLU of the gate (arXiv 2412.06464, figure 1)."""
    if out_NHV.is_cuda and has_kernels():
        return _norm_by_kernel(out_NHV, gate_NHV, weight_V, epsilon=epsilon)
    wide = out_NHV.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    normed = weight_V * scaled.to(out_NHV.dtype)
    gated: torch.Tensor = (normed * F.silu(gate_NHV.float())).to(out_NHV.dtype)
    return gated


@cache
def has_kernels() -> bool:
    return find_spec("fla") is not None


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale the last axis to length one, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _in_turn(
    inputs: Sequence[torch.Tensor],
    bounds: Sequence[int],
    first_BHKV: torch.Tensor | None = None,
    *,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs and, with `keep`, each row's last state; rows start from `first_BHKV`."""
    query_MGK, key_MGK, value_MHV, *gates = inputs
    ratio = value_MHV.shape[1] // key_MGK.shape[1]
    query_MHK, key_MHK = (x.repeat_interleave(ratio, dim=1) for x in (query_MGK, key_MGK))
    whole = (unit(query_MHK) * query_MHK.shape[-1] ** -0.5, unit(key_MHK), value_MHV, *gates)
    lengths = [end - start for start, end in pairwise(bounds)]
    rows = zip(*(torch.split(part.float(), lengths) for part in whole), strict=True)
    zero_HKV = key_MHK.new_zeros(*key_MHK.shape[1:], value_MHV.shape[-1], dtype=torch.float32)
    firsts = [zero_HKV] * len(lengths) if first_BHKV is None else first_BHKV.unbind(0)
    outs, lasts = zip(
        *(_row(state, *row) for row, state in zip(rows, firsts, strict=True)), strict=True
    )
    return torch.cat(outs).to(value_MHV.dtype), torch.stack(lasts) if keep else None


def _row(
    state_HKV: torch.Tensor,
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve a row chunk by chunk (section 3.3 of the paper); return its last state, too.

    With gamma the decay since the chunk's start and S the state there, what position i writes is
    u_i = beta_i (v_i - gamma_i S^T k_i - sum_{j<i} gamma_i / gamma_j (k_i . k_j) u_j):
    a triangular system in u. It is solved without S, which is then added chunk by chunk.
    """
    length = len(query_THK)
    size = min(CHUNK, length)
    query, key, value, log_decay, beta = (
        _chunks(part, size) for part in (query_THK, key_THK, value_THV, log_decay_TH, beta_TH)
    )
    summed_Hni = log_decay.cumsum(-1)
    decay_Hnij = _decay(summed_Hni)
    gamma_Hni1 = summed_Hni.exp().unsqueeze(-1)
    beta_Hni1 = beta.unsqueeze(-1)
    # Row i of the triangular system: earlier positions of the same chunk.
    before_Hnij = (beta_Hni1 * decay_Hnij * (key @ key.mT)).tril(-1)
    # Two right-hand sides: the values, and the part that the earlier state removes.
    wanted = torch.cat([beta_Hni1 * value, beta_Hni1 * gamma_Hni1 * key], dim=-1)
    solved = torch.linalg.solve_triangular(
        torch.eye(size, device=key.device) + before_Hnij, wanted, upper=False, unitriangular=True
    )
    written, read = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    seen_Hnij = decay_Hnij * (query @ key.mT)
    to_end = (summed_Hni[..., -1:] - summed_Hni).exp().unsqueeze(-1)
    outs = []
    # Only this loop is sequential: it carries the state from chunk to chunk.
    for n in range(query.shape[1]):
        u_HiV = written[:, n] - read[:, n] @ state_HKV
        outs.append(gamma_Hni1[:, n] * (query[:, n] @ state_HKV) + seen_Hnij[:, n] @ u_HiV)
        kept = gamma_Hni1[:, n, -1:] * state_HKV
        state_HKV = kept + (to_end[:, n] * key[:, n]).mT @ u_HiV
    return torch.cat(outs, dim=1)[:, :length].transpose(0, 1), state_HKV


def _decay(summed_Hni: torch.Tensor) -> torch.Tensor:
    """Return the decay from position j to position i, 0 where j comes after i."""
    size = summed_Hni.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=summed_Hni.device).triu(1)
    between = summed_Hni.unsqueeze(-1) - summed_Hni.unsqueeze(-2)
    # -inf comes before `exp`, because later positions have exponents that may overflow.
    return between.masked_fill(later, -torch.inf).exp()


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cut (T, H, ...) into (H, n, size, ...); padding is 0, so it does not change the state."""
    by_head = x.transpose(0, 1)
    short = -by_head.shape[1] % size
    padded = F.pad(by_head, (*(0, 0) * (x.ndim - 2), 0, short))
    return padded.reshape(x.shape[1], -1, size, *x.shape[2:])


@lru_cache(maxsize=8)
def _ends(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(bounds, device=device)


@lru_cache(maxsize=8)
def _places(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return each position's distance from its row's start."""
    lengths = [end - start for start, end in pairwise(bounds)]
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _by_kernels(
    inputs: Sequence[torch.Tensor],
    bounds: Sequence[int],
    first: torch.Tensor | None = None,
    *,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, b = (part.unsqueeze(0).contiguous() for part in inputs)
    ends = _ends(tuple(bounds), q.device)
    states = {"initial_state": first, "output_final_state": keep}
    out, last = chunk_gated_delta_rule(
        q, k, v, g=g, beta=b, cu_seqlens=ends, use_qk_l2norm_in_kernel=True, **states
    )
    return out.squeeze(0), last


def _conv_by_kernel(
    x_MC: torch.Tensor, weight_CW: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    ends = _ends(tuple(bounds), x_MC.device)
    out, _ = causal_conv1d(x_MC.unsqueeze(0), weight_CW, activation="silu", cu_seqlens=ends)
    result: torch.Tensor = out.squeeze(0)
    return result


def _norm_by_kernel(
    out_NHV: torch.Tensor, gate_NHV: torch.Tensor, weight_V: torch.Tensor, *, epsilon: float
) -> torch.Tensor:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    result: torch.Tensor = rms_norm_gated(out_NHV, gate_NHV, weight_V, None, eps=epsilon)
    return result
