"""Run the trainer's real layers on a CPU as one rank of a large layout, and count their operations.

torch's fake process group stands for the other ranks: its collectives return this rank's own
values. Matrix products are not computed, because only their shapes count. FlashAttention, the delta
rule's kernels and the grouped matrix product are replaced by one operation each that keeps for the
backward pass what the kernel keeps. Values are meaningless, so the routing is set by hand: every
expert gets the same number of positions.

A CPU has no separate memory, so tensors are marked: parameters, inputs, and all that is computed
from them, are on the "device". An operation on unmarked tensors is the host's and is not counted.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swerl.training.options import TrainerOptions
from swerl.training.rank import megatron_cpu

if TYPE_CHECKING:
    from swerl.training.rank.microbatch import PackedRows

CHUNK = 64
"""Positions of a chunk of the delta rule's kernels."""
_BACKWARD = 2.5
"""Matrix products of attention's backward pass over those of its forward pass: five over two."""


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel, or one exchange between ranks."""

    name: str
    kind: str
    """Class of the table, such as `elementwise fp32`."""
    num_bytes: float = 0.0
    """Read and written; of an exchange, the whole tensor of all ranks."""
    flops: float = 0.0
    ranks: tuple[int, ...] = ()
    """Ranks of an exchange."""


@dataclass(frozen=True, slots=True)
class Counts:
    """All that one forward and backward pass does on one rank."""

    ops: list[Op] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    """Places in the code where the host waits for the device."""


class Counted(TorchDispatchMode):
    """An allocator's count: bytes of living storages that operations made."""

    def __init__(self, without: set[int]) -> None:
        super().__init__()
        self.live = 0
        self._sizes: dict[int, int] = {}
        self._without = without

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in _tensors(out):
            self._track(each)
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in self._without:
            return
        self._sizes[key] = size
        self.live += size

        def freed() -> None:
            if self._sizes.pop(key, None) is not None:
                self.live -= size

        weakref.finalize(storage, freed)


_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
                "_unsafe_view", "is_same_size", "set_", "resize_", "record_stream"}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "bmm"}
_LOOK_UPS = {"embedding", "index_select", "index", "gather"}
"""Operations that read no more of their first tensor than they write."""
_COPIES = {"clone", "copy_", "cat", "stack", "index_select", "index", "gather", "index_copy",
           "index_add_", "index_add", "scatter", "scatter_", "scatter_add_", "scatter_add",
           "index_put", "index_put_", "_index_put_impl_", "masked_select", "masked_scatter",
           "slice_backward", "select_backward", "repeat_interleave", "embedding", "constant_pad_nd",
           "embedding_dense_backward", "nonzero", "nonzero_static", "index_copy_"}  # fmt: skip
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}
"""Operations whose result, or its size, the host must read."""


class Recorder(TorchDispatchMode):
    """Records kernels, exchanges and host syncs of marked tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._marked: dict[int, object] = {}
        self._quiet = False

    def mark(self, *values: object) -> None:
        """Put tensors on the device."""
        for each in _tensors(values):
            storage = each.untyped_storage()
            key = storage._cdata
            if key not in self._marked:
                self._marked[key] = weakref.finalize(storage, self._marked.pop, key, None)

    def is_marked(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._marked

    def wait(self) -> None:
        """Record that the host waits for the device."""
        self.counts.syncs.append(_place())

    def add(self, op: Op) -> None:
        if not self._quiet:
            self.counts.ops.append(op)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Leave out what a replaced kernel does in torch."""
        before, self._quiet = self._quiet, True
        yield
        self._quiet = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        is_exchange = func.namespace == "c10d"
        out = _product(name, args) if name in _PRODUCTS else func(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs))
        if not any(self.is_marked(each) for each in inputs):
            return out
        outputs = _tensors(out)
        self.mark(outputs)
        if self._quiet or name in _ALLOCATIONS or _is_view(func):
            return out
        if is_exchange:
            self.add(_exchange(name, args, inputs))
            return out
        if name in _WAITS or (name == "index" and _has_mask(args[1])):
            self.wait()
        if name == "_local_scalar_dense":
            return out
        self.add(_kernel(name, inputs, outputs))
        return out


class Moves(TorchFunctionMode):
    """Sees the calls that move data between host and device, which a CPU does not dispatch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        on_device = bool(args) and self._recorder.is_marked(args[0])
        if on_device and func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self._recorder.wait()
        if func is torch.Tensor.to and not on_device and self._goes_to_device(args, kwargs):
            if not kwargs.get("non_blocking"):
                self._recorder.wait()
            moved = func(*args, **kwargs).clone()
            self._recorder.mark(moved)
            return moved
        out = func(*args, **kwargs)
        # A factory that names a device writes there.
        if kwargs.get("device") is not None and isinstance(out, torch.Tensor):
            if not on_device and func is torch.tensor:
                self._recorder.wait()
            if not self._recorder.is_marked(out):
                self._recorder.mark(out)
                self._recorder.add(_kernel(func.__name__, [], [out]))
        return out

    def _goes_to_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
        return any(isinstance(each, torch.device) for each in targets) or any(
            self._recorder.is_marked(each) for each in targets
        )


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _has_mask(indices: object) -> bool:
    return any(each.dtype is torch.bool for each in _tensors(indices))


def _size(tensor: torch.Tensor) -> int:
    """Return bytes that are read or written; a broadcast tensor is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _product(name: str, args: Sequence[torch.Tensor]) -> torch.Tensor:
    left, right = args[-2:]
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _kernel(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Op:
    written = sum(map(_size, outputs))
    if name in _PRODUCTS:
        left, right = inputs[-2:]
        flops = 2.0 * left.numel() * right.shape[-1]
        kind = "fp32 products" if left.dtype is torch.float32 else "matrix products"
        return Op(name, kind, sum(map(_size, inputs)) + written, flops)
    if name in _LOOK_UPS:
        return Op(name, "copies", 2 * written + sum(map(_size, inputs[1:])))
    read = sum(map(_size, inputs[1:] if name == "copy_" else inputs))
    if name in _COPIES:
        return Op(name, "copies", read + written)
    # Reads and writes of fp32 take twice the bytes of bf16, in most cases without need.
    wide = any(each.dtype is torch.float32 for each in (*inputs, *outputs))
    return Op(name, "elementwise fp32" if wide else "elementwise bf16", read + written)


def _exchange(name: str, args: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Op:
    """Return an exchange with the bytes of its larger tensor."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            group = dist.ProcessGroup.unbox(each)
            ranks = tuple(dist.get_process_group_ranks(group))
            return Op(name, "exchanges", max(map(_size, inputs)), ranks=ranks)
    raise AssertionError(f"{name} names no group")


def _place() -> str:
    """Return the innermost function of the trainer or of Megatron-Core."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        is_adapter = path.endswith(("megatron_cpu.py", "moe_utils.py"))
        if ("/swerl/" in path or "/megatron/" in path) and not is_adapter:
            return f"{path.rsplit('/', 1)[1]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"


_recorder: list[Recorder] = []
"""The recorder at work, if there is one."""


def _record(op: Op) -> None:
    if _recorder:
        _recorder[-1].add(op)


def _bytes(*tensors: torch.Tensor) -> float:
    return float(sum(map(_size, tensors)))


class Rule(torch.autograd.Function):
    """Keeps what fla's kernel keeps: inputs, decays and the matrices within chunks of 64."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, _, value, decay, _ = inputs
        within = query.new_empty(*query.shape[:3], CHUNK)
        out = torch.empty_like(value)
        ctx.save_for_backward(*inputs, within, torch.empty_like(decay))
        positions, heads, width = query.shape[1:]
        state = 2 * width * value.shape[-1] + CHUNK * (width + value.shape[-1])
        ctx.flops = 2.0 * positions * heads * state
        _record(Op("forward", "delta rule", _bytes(*inputs, within, out), ctx.flops))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved = ctx.saved_tensors
        moved = 2 * _bytes(*saved[:5]) + _bytes(grad, *saved[5:])
        _record(Op("backward", "delta rule", moved, 2 * ctx.flops))
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
        _record(Op("forward", "attention", _bytes(query, key, value, out, sums), flops))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        moved = 2 * _bytes(query, key, value) + _bytes(out, sums, grad)
        _record(Op("backward", "attention", moved, _BACKWARD * 4.0 * query.numel()))
        return tuple(torch.empty_like(each) for each in (query, key, value))


class Grouped(torch.autograd.Function):
    """The products of all local experts: (T, I) by (E, I, O)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[2])
        ctx.flops = 2.0 * x.numel() * weight.shape[2]
        _record(Op("grouped_mm", "expert products", _bytes(x, weight, out), ctx.flops))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        moved = _bytes(x, weight, grad)
        for _ in range(1 + ctx.needs_input_grad[1]):
            _record(Op("grouped_mm", "expert products", moved, ctx.flops))
        wanted = ctx.needs_input_grad[1]
        return torch.empty_like(x), torch.empty_like(weight) if wanted else None


class Fused(torch.autograd.Function):
    """A kernel that keeps its inputs, and reads them again for its gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        # One fp32 number for each row of the first input.
        ctx.save_for_backward(*inputs, torch.empty(inputs[0].shape[:-1]))
        _record(Op("fused forward", "fused elementwise", _bytes(*inputs, out)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, _ = ctx.saved_tensors
        _record(Op("fused backward", "fused elementwise", 2 * _bytes(*inputs) + _bytes(grad)))
        if inputs[-1].numel() < inputs[0].numel():
            # Blocks write parts of the weight's gradient, which a second kernel sums.
            _record(Op("sum", "fused elementwise", _bytes(inputs[-1])))
        return tuple(torch.empty_like(each) for each in inputs)


def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a formula that is compiled on a GPU as one kernel."""

    def call(*inputs: Any) -> Any:
        if not _recorder:
            return function(*inputs)
        with _recorder[-1].quiet():
            out = function(*inputs)
        moved = _bytes(*_tensors((inputs, out)))
        _record(Op(function.__name__, "fused elementwise", moved))
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
    """Become rank 0 of a layout whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from swerl.training.rank.worker import form_groups

    megatron_cpu.install()
    replace_kernels()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    make_group = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "backend": "fake"})

    dist.new_group = torch.distributed.distributed_c10d.new_group = new_group
    form_groups(options)
    _count_waits_of_dispatcher()


def _count_waits_of_dispatcher() -> None:
    """Record the wait of Megatron-Core's dispatcher for its numbers of tokens."""
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    synchronize = dispatcher._maybe_dtoh_and_synchronize

    def counted(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_sync_point and _recorder:
            _recorder[-1].wait()
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


def _forget() -> None:
    """Empty the caches of the layers, so that every count starts alike."""
    from swerl.training.rank import attention, context, gated_delta

    for module in (attention, context, gated_delta):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def count(model: torch.nn.Module, rows: PackedRows) -> Counts:
    """Run a forward and a backward pass of `rows` and return what they did.

    The gradients are added to Megatron-Core's fp32 buffer, as its wrapper does.
    """
    _forget()
    recorder = Recorder()
    recorder.mark(*model.parameters(), *model.buffers())
    recorder.mark([getattr(rows, name) for name in type(rows).__slots__])
    _recorder.append(recorder)
    try:
        with recorder, Moves(recorder):
            total = model(rows).sum()
            # torch's `backward` would switch function modes off, also for the recomputation.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((total,), (torch.ones_like(total),), False, False, (), True, True)
    finally:
        _recorder.pop()
    for param in model.parameters():
        if param.grad is not None:
            # The bf16 gradient is read, the fp32 sum read and written.
            moved = param.numel() * (param.element_size() + 8)
            recorder.add(Op("main_grad.add_", "gradient buffer", moved))
            param.grad = None
    return recorder.counts
