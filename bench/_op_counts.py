"""Count what the trainer's real layers do on a CPU: kernels, exchanges, host syncs and bytes.

Matrix products are not computed, because only their shapes count. A CPU has no separate memory, so
tensors are marked: parameters, inputs, and all that is computed from them, are on the "device". An
operation on unmarked tensors is the host's and is not counted.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from swerl.training.rank.microbatch import PackedRows


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
    is_async: bool = False
    """Whether the next operation runs beside it."""


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
        for each in tensors(out):
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
            self.live -= self._sizes.pop(key, 0)

        weakref.finalize(storage, freed)


_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
                "_unsafe_view", "is_same_size", "set_", "resize_", "record_stream"}  # fmt: skip
_FILLS = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
"""Operations that read no value of their tensor."""
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
        for each in tensors(values):
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
        inputs = tensors((args, kwargs))
        if not any(self.is_marked(each) for each in inputs):
            return out
        outputs = tensors(out)
        self.mark(outputs)
        if self._quiet or name in _ALLOCATIONS or _is_view(func):
            return out
        if is_exchange:
            self.add(_exchange(name, args, inputs))
            return out
        has_mask = name == "index" and any(each.dtype is torch.bool for each in tensors(args[1]))
        if name in _WAITS or has_mask:
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        named = kwargs.get("device") is not None and isinstance(out, torch.Tensor)
        # What the recorder dispatches is an overload, and counted there.
        if named and not isinstance(func, torch._ops.OpOverload):
            if not on_device and func is torch.tensor:
                self._recorder.wait()
            if not self._recorder.is_marked(out):
                self._recorder.mark(out)
                if func.__name__ not in _ALLOCATIONS:
                    self._recorder.add(_kernel(func.__name__, [], [out]))
        return out

    def _goes_to_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
        return any(isinstance(each, torch.device) for each in targets) or any(
            self._recorder.is_marked(each) for each in targets
        )


def tensors(values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


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
    read = sum(map(_size, inputs[1:] if name in {"copy_", *_FILLS} else inputs))
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
            # The default, which is left out, is not to wait.
            is_async = all(each is not False for each in args)
            return Op(name, "exchanges", max(map(_size, inputs)), ranks=ranks, is_async=is_async)
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


recorders: list[Recorder] = []
"""The recorder at work, if there is one."""


def record(op: Op) -> None:
    if recorders:
        recorders[-1].add(op)


def num_bytes(*tensors: torch.Tensor) -> float:
    return float(sum(map(_size, tensors)))


def count(model: torch.nn.Module, rows: PackedRows) -> Counts:
    """Run a forward and a backward pass of `rows` and return what they did.

    The gradients are added to Megatron-Core's fp32 buffer, as its wrapper does.
    """
    from swerl.training.rank import attention, context, gated_delta

    # Every count starts alike.
    for module in (attention, context, gated_delta):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    recorder = Recorder()
    recorder.mark(*model.parameters(), *model.buffers())
    recorder.mark([getattr(rows, name) for name in type(rows).__slots__])
    recorders.append(recorder)
    try:
        with recorder, Moves(recorder):
            total = model(rows).sum()
            # torch's `backward` would switch function modes off, also for the recomputation.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((total,), (torch.ones_like(total),), False, False, (), True, True)
    finally:
        recorders.pop()
    for param in model.parameters():
        if param.grad is not None:
            # The bf16 gradient is read, the fp32 sum read and written.
            moved = param.numel() * (param.element_size() + 8)
            recorder.add(Op("main_grad.add_", "gradient buffer", moved))
            param.grad = None
    return recorder.counts
