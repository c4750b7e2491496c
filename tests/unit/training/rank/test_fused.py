"""Norms and fp32 products that keep their inputs: as autograd computes them, in fewer bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")
import torch

from swerl.training.rank.fused import rms_norm, wide_linear

EPS = 1e-6
TYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def plain_norm(x: torch.Tensor, weight: torch.Tensor, *, adds_one: bool) -> torch.Tensor:
    wide = x.float()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    if adds_one:
        return (normed * (1 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_norm_and_its_gradients_are_autograds(dtype: torch.dtype, adds_one: bool) -> None:
    x, weight = leaves(dtype, (7, 3, 64), (64,))
    grad = torch.randn(x.shape).to(dtype)
    found = rms_norm(x, weight, EPS, adds_one=adds_one)
    wanted = plain_norm(x, weight, adds_one=adds_one)
    torch.testing.assert_close(found, wanted, rtol=TYPES[dtype], atol=TYPES[dtype])
    ours = torch.autograd.grad(found, (x, weight), grad)
    theirs = torch.autograd.grad(wanted, (x, weight), grad)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other, rtol=TYPES[dtype], atol=8 * TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_wide_product_and_its_gradients_are_autograds(dtype: torch.dtype) -> None:
    x, weight = leaves(dtype, (5, 2, 32), (6, 32))
    grad = torch.randn(5, 2, 6)
    found = wide_linear(x, weight)
    wanted = torch.nn.functional.linear(x.float(), weight.float())
    assert torch.equal(found, wanted)
    ours = torch.autograd.grad(found, (x, weight), grad)
    theirs = torch.autograd.grad(wanted, (x, weight), grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=TYPES[dtype], atol=TYPES[dtype])


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    x, weight, router = leaves(torch.bfloat16, (16, 64), (64,), (8, 64))
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x, weight, EPS, adds_one=True)
        wide_linear(x, router)
    assert kept == {tensor.data_ptr() for tensor in (x, weight, router)}
