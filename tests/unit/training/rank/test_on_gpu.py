"""Kernels on a GPU against the same formulas in fp32: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("megatron.core")
import torch

from swerl.cluster.checks import FindingState, check_kernels
from swerl.training.rank import attention, fused, gated_delta, moe
from swerl.training.weight_sync import checksum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BF16, FP32 = torch.bfloat16, torch.float32
ERRORS = {BF16: 2e-2, FP32: 1e-5}
"""Largest error of a tensor, relative to its norm: the rounding of its type, a few times over."""


def close(found: torch.Tensor, wanted: torch.Tensor, error: float) -> None:
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    assert found.isfinite().all()
    assert (found - wanted).norm() <= error * wanted.norm() + 1e-12


def compare(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    error: float = 0.0,
) -> None:
    """Compare values and gradients of a function on the GPU with those in fp32 on the CPU."""
    results = []
    rounded = [each.to(dtype) for each in inputs]
    for move in (lambda x: x.cuda(), lambda x: x.float()):
        leaves = [move(each).detach().requires_grad_() for each in rounded]
        out = function(*leaves)
        torch.manual_seed(2)
        grad = torch.randn(out.shape).to(out)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted, error or ERRORS[dtype])


def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("shape", [(300, 1, 2048), (37, 16, 128)], ids=str)
def test_a_norm(shape: tuple[int, ...], adds_one: bool, dtype: torch.dtype) -> None:
    compare(
        lambda x, weight: fused.rms_norm(x, weight, 1e-6, adds_one=adds_one),
        random(shape, shape[-1:]),
        dtype,
    )


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_rotation_of_a_part_of_each_head(dtype: torch.dtype) -> None:
    angles = torch.arange(300.0)[:, None, None, None] * torch.rand(64).repeat(2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return fused.rotate_by_position(x, angles.to(x.device))

    compare(rotate, random((300, 1, 4, 256)), dtype)


def test_the_router_s_product_is_fp32() -> None:
    compare(fused.wide_linear, random((500, 1, 256), (64, 256)), FP32)


@pytest.mark.parametrize("head", [128, 256])
@pytest.mark.parametrize("keys", [(3, 700, 64), (10, 900, 2000)], ids=["whole rows", "late pieces"])
def test_attention_of_ragged_rows(keys: tuple[int, ...], head: int) -> None:
    queries = (3, 700, 64)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention.attend(query, key, value, queries, keys)

    shapes = (sum(queries), 16, head), (sum(keys), 2, head), (sum(keys), 2, head)
    compare(attend, random(*shapes), BF16)
    assert attention.installed_kernel() is not None, "no kernel for rows of several lengths"


@pytest.mark.parametrize("starts_within", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_delta_rule(dtype: torch.dtype, starts_within: bool) -> None:
    bounds, heads, key, value = [0, 5, 333, 334, 700], 2, 128, 128
    hopper = torch.cuda.get_device_capability()[0] == 9
    for each in check_kernels("", ["fla"], "h100" if hopper else ""):
        if each.state is not FindingState.OK:
            pytest.skip(f"{each.check} {each.found}: {each.fix}")

    def rule(*inputs: torch.Tensor) -> torch.Tensor:
        *parts, decay, beta, first = inputs
        gates = -decay.float().abs() * 0.1, beta.float().sigmoid()
        by = gated_delta._by_kernels if first.is_cuda else gated_delta._in_turn
        state = first.float() if starts_within else None
        out, last = by((*parts, *gates), bounds, state, keep=True)
        assert last is not None
        return torch.cat([out.flatten().float(), last.flatten() + 0 * first.float().flatten()])

    length = bounds[-1]
    shapes = [(length, heads // 2, key), (length, heads // 2, key), (length, heads, value)]
    inputs = random(*shapes, (length, heads), (length, heads), (4, heads, key, value))
    # Triton multiplies fp32 as TF32.
    compare(rule, inputs, dtype, error=2e-3 if dtype is FP32 else 0.0)


@pytest.mark.parametrize("counts", [[64, 0, 17, 3, 0, 200, 1, 0]], ids=str)
def test_products_of_experts_without_tokens(counts: list[int]) -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        by = moe._multiply_grouped if x.is_cuda else moe._multiply_in_turn
        return by(x, weight, torch.tensor(counts))

    compare(multiply, random((sum(counts), 128), (len(counts), 64, 128)), BF16)


@pytest.mark.parametrize("size", [0, 1, 8191, 8193, 3 * 8192 * 512 + 5])
def test_a_checksum_does_not_depend_on_the_place(size: int) -> None:
    tensor = torch.arange(size).to(BF16)
    assert checksum.hash_tensor(tensor.cuda(), "cuda") == checksum.hash_tensor(tensor, "cuda")
