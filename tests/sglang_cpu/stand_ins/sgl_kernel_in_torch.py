"""Kernels that Qwen3.5 calls on a CPU, in torch, with the names and arguments of SGLang 0.5.21.

SGLang ships them in C++, for some processors and 16 bits, or in Triton. Where one writes into its
arguments, so does the function here. They are slow: for tests and small models.

Axes: T tokens of all rows, B rows, H heads of queries and keys, V heads of values, K and D their
widths, C channels of a convolution, W its width.
"""

# heavy imports: this file only runs in SGLang's own processes

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

L2_EPS = 1e-6


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply `x` in place with the gate's sigmoid."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head; norms are kept as their difference from 1."""
    heads = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    weights = 1.0 + q_weight, 1.0 + k_weight
    first, second = (_norm(x, weight, eps) for x, weight in zip(heads, weights, strict=True))
    return first, second


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take query and gate of each head apart, and normalise queries and keys."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_gate_sigmoid_mul_add(
    hidden: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a shared expert's output, times its gate, to `out`."""
    out.add_(shared * (hidden @ gate_weight).sigmoid().unsqueeze(-1))


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k: int, num_v: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a delta net's projections: q, k and v together, z by head, b, a."""
    keys, values = num_k * k_dim, num_v * v_dim
    qkv, z = torch.split(qkvz, [2 * keys + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_v, v_dim), b.contiguous(), a.contiguous()


def fused_rmsnorm_gated_cpu(
    x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise, then gate by silu."""
    return _norm(x, weight, eps) * F.silu(z)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays and strengths, each (1, T, V)."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def causal_conv1d_fn_cpu(
    x_CT: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: object = None,
) -> torch.Tensor:
    """Convolve each row with what came before it, and keep its last inputs as its state."""
    out_CT = torch.zeros_like(x_CT)
    rows = zip(_rows(query_start_loc), cache_indices.tolist(), strict=False)
    for number, (row, slot) in enumerate(rows):
        state_CW = conv_states[slot].to(x_CT.dtype)
        if not bool(has_initial_state[number]):
            state_CW = torch.zeros_like(state_CW)
        out_CT[:, row] = _convolve(x_CT[:, row], state_CW, weight_CW, bias_C, activation)
        conv_states[slot] = torch.cat([state_CW, x_CT[:, row]], 1)[:, -state_CW.shape[1] :].to(
            conv_states.dtype
        )
    return out_CT


def causal_conv1d_update_cpu(
    x_BC: torch.Tensor,
    conv_states: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one more token of each row."""
    starts = torch.arange(len(x_BC) + 1)
    return causal_conv1d_fn_cpu(
        x_BC.T,
        weight_CW,
        bias_C,
        activation=activation,
        conv_states=conv_states,
        has_initial_state=torch.ones(len(x_BC), dtype=torch.bool),
        cache_indices=conv_state_indices,
        query_start_loc=starts,
    ).T


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[torch.Tensor, None, None]:
    """Run the rule over each row from its state, (slots, V, D, K), which is brought up to date."""
    assert not head_first and use_qk_l2norm_in_kernel
    out = torch.zeros_like(v)
    slots = initial_state_indices.tolist()
    for row, slot in zip(_rows(cu_seqlens), slots, strict=False):
        decays, strengths = g[0, row], beta[0, row]
        out[0, row], state = _delta_rule(
            q[0, row], k[0, row], v[0, row], decays, strengths, initial_state[slot]
        )
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Run the rule over one more token of each row."""
    assert softplus_beta == 1.0 and softplus_threshold == 20.0  # torch's own
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q, k, v, g, beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


def _rows(starts: torch.Tensor) -> Iterator[slice]:
    bounds = starts.tolist()
    yield from map(slice, bounds[:-1], bounds[1:])


def _convolve(
    x_CT: torch.Tensor,
    state_CW: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    channels = len(weight_CW)
    whole_CT = torch.cat([state_CW, x_CT], 1)[:, -(x_CT.shape[1] + weight_CW.shape[1] - 1) :]
    out_CT = F.conv1d(whole_CT[None], weight_CW[:, None], bias_C, groups=channels)[0]
    return F.silu(out_CT) if activation in ("silu", "swish") else out_CT


def _delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TVD: torch.Tensor,
    g_TV: torch.Tensor,
    beta_TV: torch.Tensor,
    state_VDK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule, position by position (arXiv 2412.06464, equation 10)."""
    group = v_TVD.shape[1] // q_THK.shape[1]
    q_TVK, k_TVK = (_unit(x.float()).repeat_interleave(group, 1) for x in (q_THK, k_THK))
    q_TVK = q_TVK * q_TVK.shape[-1] ** -0.5
    state_VDK, outputs = state_VDK.float(), []
    for q_VK, k_VK, v_VD, g_V, beta_V in zip(q_TVK, k_TVK, v_TVD, g_TV, beta_TV, strict=True):
        state_VDK = state_VDK * g_V.exp()[:, None, None]
        change_VD = (v_VD - torch.einsum("vdk,vk->vd", state_VDK, k_VK)) * beta_V[:, None]
        state_VDK = state_VDK + change_VD[:, :, None] * k_VK[:, None, :]
        outputs.append(torch.einsum("vdk,vk->vd", state_VDK, q_VK))
    return torch.stack(outputs).to(v_TVD.dtype), state_VDK


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
