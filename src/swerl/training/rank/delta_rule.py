"""The gated delta rule and the convolution before it, on packed rows.

State and arithmetic are fp32 whatever the inputs are. Both begin anew at the start of every row.
Where flash-linear-attention is installed, its kernel applies the rule on CUDA; the plain torch here
is its reference, and what runs elsewhere.

Axes: M positions of whole rows end to end, T positions of one row, H heads, K key width, V value
width, C channels, n chunks, i and j positions within a chunk.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F

CHUNK = 64
"""Positions that are solved together; flash-linear-attention's kernels take as many."""


def gated_delta_rule(
    query_MHK: torch.Tensor,
    key_MHK: torch.Tensor,
    value_MHV: torch.Tensor,
    *,
    log_decay_MH: torch.Tensor,
    beta_MH: torch.Tensor,
    bounds: Sequence[int],
) -> torch.Tensor:
    """Return `out_MHV` of Gated Delta Networks (arXiv 2412.06464, eq. 10), row by row.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t, with
    queries and keys of length one and queries divided by the root of K. `bounds` are the rows'
    first positions and the end of the last.
    """
    if query_MHK.is_cuda and has_kernels():
        return _by_kernels(query_MHK, key_MHK, value_MHV, log_decay_MH, beta_MH, bounds)
    query_MHK = unit(query_MHK) * query_MHK.shape[-1] ** -0.5
    whole = (query_MHK, unit(key_MHK), value_MHV, log_decay_MH, beta_MH)
    lengths = [end - start for start, end in pairwise(bounds)]
    rows = zip(*(torch.split(part.float(), lengths) for part in whole), strict=True)
    return torch.cat([_row(*row) for row in rows]).to(value_MHV.dtype)


def causal_conv(x_MC: torch.Tensor, weight_CW: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Return SiLU of the causal convolution, channel by channel, that sees one row only."""
    place_M = _places(bounds, x_MC.device)
    wide, width = x_MC.float(), weight_CW.shape[1]
    total_MC = wide * weight_CW[:, -1].float()
    for back in range(1, min(width, len(x_MC))):
        shifted = F.pad(wide[:-back], (0, 0, back, 0)) * (place_M >= back).unsqueeze(1)
        total_MC = total_MC + shifted * weight_CW[:, -1 - back].float()
    return F.silu(total_MC).to(x_MC.dtype)


@cache
def has_kernels() -> bool:
    """Say whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale the last axis to length one, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _row(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
) -> torch.Tensor:
    """Solve a row chunk by chunk (section 3.3 of the paper).

    With gamma the decay since the chunk's start and S the state there, what position i writes is
    u_i = beta_i (v_i - gamma_i S^T k_i - sum_{j<i} gamma_i / gamma_j (k_i . k_j) u_j):
    a triangular system in u, of which S is split off to be put in chunk by chunk.
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
    before_Hnij = (beta_Hni1 * decay_Hnij * (key @ key.mT)).tril(-1)
    wanted = torch.cat([beta_Hni1 * value, beta_Hni1 * gamma_Hni1 * key], dim=-1)
    solved = torch.linalg.solve_triangular(
        torch.eye(size, device=key.device) + before_Hnij, wanted, upper=False, unitriangular=True
    )
    written, read = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    seen_Hnij = decay_Hnij * (query @ key.mT)
    to_end = (summed_Hni[..., -1:] - summed_Hni).exp().unsqueeze(-1)
    state_HKV = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1])
    outs = []
    for n in range(query.shape[1]):
        u_HiV = written[:, n] - read[:, n] @ state_HKV
        outs.append(gamma_Hni1[:, n] * (query[:, n] @ state_HKV) + seen_Hnij[:, n] @ u_HiV)
        kept = gamma_Hni1[:, n, -1:] * state_HKV
        state_HKV = kept + (to_end[:, n] * key[:, n]).mT @ u_HiV
    return torch.cat(outs, dim=1)[:, :length].transpose(0, 1)


def _decay(summed_Hni: torch.Tensor) -> torch.Tensor:
    """Return the decay from position j to position i, 0 where j comes after i."""
    size = summed_Hni.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=summed_Hni.device).triu(1)
    between = summed_Hni.unsqueeze(-1) - summed_Hni.unsqueeze(-2)
    return between.masked_fill(later, -torch.inf).exp()


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cut (T, H, ...) into (H, n, size, ...); padding is 0, so it writes nothing."""
    by_head = x.transpose(0, 1)
    short = -by_head.shape[1] % size
    padded = F.pad(by_head, (*(0, 0) * (x.ndim - 2), 0, short))
    return padded.reshape(x.shape[1], -1, size, *x.shape[2:])


def _places(bounds: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return each position's distance from its row's start."""
    lengths = [end - start for start, end in pairwise(bounds)]
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _by_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    bounds: Sequence[int],
) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch = (part.unsqueeze(0).contiguous() for part in (query, key, value, log_decay, beta))
    q, k, v, g, b = batch
    ends = torch.tensor(bounds, device=query.device)
    out, _ = chunk_gated_delta_rule(
        q, k, v, g=g, beta=b, cu_seqlens=ends, use_qk_l2norm_in_kernel=True
    )
    result: torch.Tensor = out[0]
    return result
