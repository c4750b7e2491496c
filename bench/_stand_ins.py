"""Stand-ins of kernels and of other ranks, so that a CPU runs one rank of a large layout.

torch's fake process group stands for the other ranks: its collectives return this rank's own
values. FlashAttention, the delta rule's kernels and the grouped matrix product are one operation
each that keeps for the backward pass what the kernel keeps. Values are meaningless, so the routing
is set by hand: every expert gets the same number of positions.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench._op_counts import Op, num_bytes, record, recorders, tensors
from swerl.training.options import TrainerOptions
from swerl.training.rank import megatron_cpu

CHUNK = 64
"""Positions of a chunk of the delta rule's kernels."""
_BACKWARD = 2.5
"""Matrix products of attention's backward pass over those of its forward pass: five over two."""


class Rule(torch.autograd.Function):
    """Keeps what fla's kernel keeps: inputs, decays and the matrices within chunks of 64."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, _, value, decay, _ = inputs
        within = value.new_empty(*value.shape[:3], CHUNK)
        out = torch.empty_like(value)
        ctx.save_for_backward(*inputs, within, torch.empty_like(decay))
        positions, heads = value.shape[1:3]
        width = query.shape[-1]
        state = 2 * width * value.shape[-1] + CHUNK * (width + value.shape[-1])
        ctx.flops = 2.0 * positions * heads * state
        record(Op("forward", "delta rule", num_bytes(*inputs, within, out), ctx.flops))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved = ctx.saved_tensors
        moved = 2 * num_bytes(*saved[:5]) + num_bytes(grad, *saved[5:])
        record(Op("backward", "delta rule", moved, 2 * ctx.flops))
        return tuple(torch.empty_like(each) for each in saved[:5])


class Attend(torch.autograd.Function):
    """Keeps what FlashAttention keeps: inputs, the output, and one fp32 sum a head.

    Its operations are those of one pair of a query and a key for each query; they grow with the
    rows' lengths, which the caller knows.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        flops = 4.0 * query.numel()
        record(Op("forward", "attention", num_bytes(query, key, value, out, sums), flops))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        moved = 2 * num_bytes(query, key, value) + num_bytes(out, sums, grad)
        record(Op("backward", "attention", moved, _BACKWARD * 4.0 * query.numel()))
        return tuple(torch.empty_like(each) for each in (query, key, value))


class Grouped(torch.autograd.Function):
    """The products of all local experts: (T, I) by (E, I, O)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[2])
        ctx.flops = 2.0 * x.numel() * weight.shape[2]
        record(Op("grouped_mm", "expert products", num_bytes(x, weight, out), ctx.flops))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        moved = num_bytes(x, weight, grad)
        for _ in range(1 + ctx.needs_input_grad[1]):
            record(Op("grouped_mm", "expert products", moved, ctx.flops))
        wanted = ctx.needs_input_grad[1]
        return torch.empty_like(x), torch.empty_like(weight) if wanted else None


class Fused(torch.autograd.Function):
    """A kernel that keeps its inputs, and reads them again for its gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        # One fp32 number for each row of the first input.
        ctx.save_for_backward(*inputs, torch.empty(inputs[0].shape[:-1]))
        record(Op("fused forward", "fused elementwise", num_bytes(*inputs, out)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, _ = ctx.saved_tensors
        record(Op("fused backward", "fused elementwise", 2 * num_bytes(*inputs) + num_bytes(grad)))
        if inputs[-1].numel() < inputs[0].numel():
            # Blocks write parts of the weight's gradient, which a second kernel sums.
            record(Op("sum", "fused elementwise", num_bytes(inputs[-1])))
        return tuple(torch.empty_like(each) for each in inputs)


def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a formula that is compiled on a GPU as one kernel."""

    def call(*inputs: Any) -> Any:
        if not recorders:
            return function(*inputs)
        with recorders[-1].quiet():
            out = function(*inputs)
        moved = num_bytes(*tensors((inputs, out)))
        record(Op(function.__name__, "fused elementwise", moved))
        return out

    return call


def replace_kernels() -> None:
    """Put one operation in place of each kernel; the code around the kernels stays as it is."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.attention import Attention

    from swerl.training.rank import attention, fused, gated_delta, moe

    swiglu = ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")
    for module, names in (
        (fused, ("norm", "norm_gradients", "rotate")),
        (fused_bias_swiglu, swiglu),
    ):
        for name in names:
            setattr(module, name, _one_kernel(getattr(module, name)))
    Attention._apply_output_gate = lambda _, x, gate: Fused.apply(x, gate.reshape(x.shape))

    def rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **unused: Any) -> tuple[Any, None]:
        return Rule.apply(q, k, v, g, beta), None

    def convolve(x: Any, weight: Any, **unused: Any) -> tuple[Any, None]:
        return Fused.apply(x, weight), None

    def norm(x: Any, gate: Any, weight: Any, bias: None, **unused: Any) -> Any:
        return Fused.apply(x, gate, weight)

    _pretend("fla.ops.gated_delta_rule", chunk_gated_delta_rule=rule)
    _pretend("fla.modules.causal_conv1d", causal_conv1d=convolve)
    _pretend("fla.modules.norm.fused_norm_gate", rms_norm_gated=norm)

    def gated(
        q: Any, k: Any, v: Any, *, log_decay_MH: Any, beta_MH: Any, bounds: Any, forest: None
    ) -> Any:
        return gated_delta._by_kernels((q, k, v, log_decay_MH, beta_MH), bounds)[0]

    def kernel(query: Any, key: Any, value: Any, *bounds: Any, **unused: Any) -> Any:
        return Attend.apply(query, key, value)

    def attend(query: Any, key: Any, value: Any, queries: Any, keys: Any, scale: Any = None) -> Any:
        return attention.varlen(kernel, query, key, value, queries, keys, scale)

    def grouped_mm(x: Any, weight: Any, *, offs: Any) -> Any:
        return Grouped.apply(x, weight)

    gated_delta.gated_delta_rule = gated
    gated_delta.causal_conv = gated_delta._conv_by_kernel
    gated_delta.gated_norm = gated_delta._norm_by_kernel
    attention.attend = attend
    moe._multiply_in_turn = moe._multiply_grouped
    torch.nn.functional.grouped_mm = grouped_mm


def _pretend(name: str, **functions: Callable[..., Any]) -> None:
    """Put a module of these functions in the place of an installed one."""
    module = types.ModuleType(name)
    vars(module).update(functions)
    sys.modules[name] = module


def join_fake_ranks(options: TrainerOptions) -> None:
    """Become rank 0 of a layout whose other ranks do not exist, with stand-ins of the kernels."""
    form_fake_groups(options)
    replace_kernels()
    _count_waits_of_dispatcher()


def form_fake_groups(options: TrainerOptions) -> None:
    """Form Megatron-Core's groups of a layout as its rank 0; the other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from swerl.training.rank.worker import form_groups

    megatron_cpu.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    make_group = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "backend": "fake"})

    dist.new_group = torch.distributed.distributed_c10d.new_group = new_group
    form_groups(options)


def _count_waits_of_dispatcher() -> None:
    """Record the wait of Megatron-Core's dispatcher for its numbers of tokens."""
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    synchronize = dispatcher._maybe_dtoh_and_synchronize

    def counted(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_sync_point and recorders:
            recorders[-1].wait()
        return synchronize(self, point, tokens_per_expert)

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        # A copy that is not marked is on the host.
        with torch.utils._python_dispatch._disable_current_modes():
            copied = tensor.clone()
            return copied.numpy() if as_numpy else copied

    dispatcher._maybe_dtoh_and_synchronize = counted
    token_dispatcher.maybe_move_tensor_to_cpu = move
