"""Norms, rotations and fp32 products that keep their inputs only, each as one kernel on a GPU.

Autograd would keep every intermediate tensor, most of them in fp32. The functions of this file keep
their inputs and compute the rest again in the backward pass, on a CPU as well. On a GPU
`torch.compile` makes one kernel of each formula, which reads and writes every value once.

Axes: N positions or heads of positions, H width.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from shutil import which
from typing import Any, ParamSpec, TypeVar

import torch

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")


def fuse(function: Callable[_Inputs, _Output]) -> Callable[_Inputs, _Output]:
    """Return `function` as one kernel for tensors on a GPU.

    Without Triton and the C compiler that it needs, and on a CPU, torch's own kernels run. So they
    do with `TORCHDYNAMO_DISABLE=1`.
    """

    @cache
    def compiled() -> Callable[_Inputs, _Output]:
        has_compiler = find_spec("triton") and (which("gcc") or which("clang"))
        return torch.compile(function, dynamic=True) if has_compiler else function

    @wraps(function)
    def call(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> _Output:
        first = args[0]
        on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        return compiled()(*args, **kwargs) if on_gpu else function(*args, **kwargs)

    return call


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, adds_one: bool) -> torch.Tensor:
    """Return the root-mean-square norm of the last axis (Zhang and Sennrich 2019, eq. 4).

    It is computed in fp32. With `adds_one` the factor is one plus the weight, in fp32; otherwise
    the normed value is rounded to the type of `x` before it is multiplied.
    """
    normed: torch.Tensor = _RmsNorm.apply(x, weight, eps, adds_one)  # type: ignore[no-untyped-call]
    return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, adds_one
        return norm(x, weight, eps, adds_one)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad, weight_grad = norm_gradients(grads[0], x, weight, *ctx.settings)
        return x_grad, weight_grad if ctx.needs_input_grad[1] else None, None, None


@fuse
def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if adds_one:
        return (wide * scale * (1.0 + weight.float())).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight


@fuse
def norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `x` and `weight`.

    With s the scale, y = x s and g the gradient of y: dx = s (g - y mean(g y)).
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, upper = wide * scale, grad.float()
    inner = upper * (weight.float() + adds_one)
    x_grad = scale * (inner - scaled * (inner * scaled).mean(-1, keepdim=True))
    weight_grad = (upper * scaled).flatten(0, -2).sum(0)
    return x_grad.to(x.dtype), weight_grad.to(weight.dtype)


def rotate_by_position(
    x: torch.Tensor,
    angles: torch.Tensor,
    *,
    mscale: float = 1.0,
    **interleaved: object,
) -> torch.Tensor:
    """Rotate pairs of values by their position's angles (RoPE, arXiv 2104.09864, eq. 34).

    Takes the place of Megatron-Core's formula, which has nine kernels. The last axis of `angles`
    holds each angle twice; values of `x` beyond it stay. A pair's values are half that width apart:
    Megatron-Core's releases name the switches for neighbouring pairs differently, and all are off.
    """
    assert not any(interleaved.values()), "no family pairs neighbours"
    rotated: torch.Tensor = _Rotation.apply(x, angles, mscale)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, angles: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(angles)
        ctx.scale = scale
        return rotate(x, angles.cos() * scale, angles.sin() * scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        # The transpose of a rotation turns back.
        return rotate(grads[0], angles.cos() * ctx.scale, angles.sin() * -ctx.scale), None, None


@fuse
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin, size = cos.to(x.dtype), sin.to(x.dtype), cos.shape[-1]
    first, second = x[..., :size].chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return torch.cat((x[..., :size] * cos + turned * sin, x[..., size:]), -1)


def wide_linear(x_NH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of `x_NH` and the transposed weight, both taken as fp32, in fp32."""
    product: torch.Tensor = _WideLinear.apply(x_NH, weight)  # type: ignore[no-untyped-call]
    return product


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NH, weight)
        return torch.nn.functional.linear(x_NH.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_NH, weight = ctx.saved_tensors
        x_grad = (grads[0] @ weight.float()).to(x_NH.dtype)
        if not ctx.needs_input_grad[1]:
            return x_grad, None
        by_position = grads[0].flatten(0, -2).mT
        return x_grad, (by_position @ x_NH.flatten(0, -2).float()).to(weight.dtype)
