"""The gated delta rule against its recurrence written out, and rows that stay apart."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from swerl.training.rank.gated_delta import (
    CHUNK,
    causal_conv,
    gated_delta_rule,
    gated_norm,
    has_kernels,
)

HEADS, KEY, VALUE = 2, 8, 12
ROWS = [0, 5, 5 + 2 * CHUNK + 9, 5 + 2 * CHUNK + 10]
"""Bounds of a short row, a row of three chunks, and one of a single position."""


class Inputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def row(self, start: int, end: int) -> Inputs:
        return Inputs(*(part[start:end] for part in self))

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(part.to(dtype) for part in self))


def inputs(length: int, *, decay: float = 0.5) -> Inputs:
    torch.manual_seed(0)
    return Inputs(
        torch.randn(length, HEADS, KEY),
        torch.randn(length, HEADS, KEY),
        torch.randn(length, HEADS, VALUE),
        -torch.rand(length, HEADS) * decay,
        torch.rand(length, HEADS),
    )


def by_rule(x: Inputs, bounds: list[int]) -> torch.Tensor:
    return gated_delta_rule(*x[:3], log_decay_MH=x.log_decay, beta_MH=x.beta, bounds=bounds)


def by_recurrence(x: Inputs, *, state_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Equation 10 of arXiv 2412.06464, position by position."""
    query, key, value, log_decay, beta = x.to(torch.float64)
    query, key = unit(query) * KEY**-0.5, unit(key)
    state = torch.zeros(HEADS, KEY, VALUE, dtype=state_dtype)
    outs = []
    for t in range(len(query)):
        k, v, b = key[t][:, :, None], value[t][:, None], beta[t][:, None, None]
        moved = state.double() * log_decay[t].exp()[:, None, None]
        moved = moved - b * k @ (k.mT @ moved) + b * k @ v
        state = moved.to(state_dtype)
        outs.append((state.double().mT @ query[t][:, :, None]).squeeze(-1))
    return torch.stack(outs)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 9])
def test_chunks_equal_the_recurrence_and_the_rule_of_transformers(length: int) -> None:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

    x = inputs(length)
    found = by_rule(x, [0, length])
    assert gap(found, by_recurrence(x)) <= 1e-6
    expected, _ = theirs.torch_chunk_gated_delta_rule(
        *(part[None] for part in x[:3]),
        g=x.log_decay[None],
        beta=x.beta[None],
        use_qk_l2norm_in_kernel=True,
    )
    assert gap(found, expected[0]) <= 1e-6


def test_gradients_equal_those_of_the_recurrence() -> None:
    length = CHUNK + 9
    direction = torch.randn(length, HEADS, VALUE)
    found = []
    for rule in (lambda x: by_rule(x, [0, length]), by_recurrence):
        x = Inputs(*(part.requires_grad_() for part in inputs(length)))
        (rule(x) * direction).sum().backward()
        found.append([part.grad for part in x])

    for ours, expected in zip(*found, strict=True):
        assert ours is not None and expected is not None
        assert gap(ours, expected) <= 1e-5 * float(expected.abs().max())


def test_packed_rows_equal_separate_ones() -> None:
    x = inputs(ROWS[-1], decay=0.05)
    separate = torch.cat([by_rule(x.row(*row), [0, row[1] - row[0]]) for row in pairwise(ROWS)])

    assert gap(by_rule(x, ROWS), separate) <= 1e-6
    # A state that leaks from row to row is far outside what the comparison allows.
    assert gap(by_rule(x, [0, ROWS[-1]]), separate) >= 1e-2


def test_the_state_is_fp32_if_the_model_is_bf16() -> None:
    length = 1500
    x = inputs(length, decay=2e-3).to(torch.bfloat16)
    x = x._replace(log_decay=x.log_decay.float(), beta=x.beta.float() * 0.05)
    exact = by_recurrence(x)
    size = float(exact.abs().max())

    out = by_rule(x, [0, length])
    assert out.dtype is torch.bfloat16
    # bf16 keeps 8 bits: rounding the output alone is an error of 2^-9 of the largest.
    assert gap(out, exact) <= size * 2**-8
    assert gap(by_recurrence(x, state_dtype=torch.bfloat16), exact) >= size * 2**-6


def test_a_key_head_serves_its_value_heads_in_turn() -> None:
    x = inputs(20)
    queries, keys = torch.randn(2, 20, HEADS // 2, KEY)
    repeated = (each.repeat_interleave(2, dim=1) for each in (queries, keys))
    wanted = by_rule(x._replace(**dict(zip(("query", "key"), repeated, strict=True))), [0, 20])
    assert torch.equal(by_rule(x._replace(query=queries, key=keys), [0, 20]), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_kernels()), reason="needs a GPU with fla-core"
)
def test_kernels_of_convolution_and_norm_agree_with_torch() -> None:
    torch.manual_seed(0)
    x_MC, weight_CW = torch.randn(ROWS[-1], 64), torch.randn(64, 4)
    out_NHV, gate_NHV = torch.randn(2, ROWS[-1], 4, 16)
    weight_V = torch.rand(16)
    on_gpu = [each.cuda() for each in (x_MC, weight_CW, out_NHV, gate_NHV, weight_V)]
    conv = causal_conv(on_gpu[0], on_gpu[1], ROWS).cpu()
    torch.testing.assert_close(conv, causal_conv(x_MC, weight_CW, ROWS), atol=1e-5, rtol=1e-5)
    normed = gated_norm(*on_gpu[2:], epsilon=1e-6).cpu()
    expected = gated_norm(out_NHV, gate_NHV, weight_V, epsilon=1e-6)
    torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)
