"""Run unmodified Megatron-Core without CUDA, over gloo process groups.

Megatron-Core needs CUDA in three ways: it calls `torch.cuda` for the current device, streams and
random state; it passes `device="cuda"` to factories; and it compares `tensor.type()` with
`"torch.cuda.FloatTensor"`. `install` replaces the first with the CPU's equivalents, and the other
two with a torch function mode. It does nothing if CUDA exists.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode

_active: list[_CudaMeansCpu] = []


def install() -> None:
    """Redirect every CUDA call of Megatron-Core to the CPU, for the rest of this process."""
    if torch.cuda.is_available() or _active:
        return
    _import_megatron_uncompiled()
    _replace_runtime()
    _replace_random_state()
    _replace_moves_to_host()
    _replace_uneven_exchanges()
    mode = _CudaMeansCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _active.append(mode)


class _CudaMeansCpu(TorchFunctionMode):
    """Replace `cuda` by `cpu` in every torch call."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _IDENTITY:
            return args[0]
        if func is _TENSOR_TYPE and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if kwargs:
            kwargs = _on_cpu(kwargs)
        return func(*args, **(kwargs or {}))


_IDENTITY = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
"""Calls that would move a tensor to where it already is."""

_TENSOR_TYPE: Callable[..., object] = torch.Tensor.type


def _on_cpu(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    changes: dict[str, object] = {}
    if _is_cuda(kwargs.get("device")):
        changes["device"] = "cpu"
    if kwargs.get("pin_memory"):
        changes["pin_memory"] = False
    return {**kwargs, **changes} if changes else kwargs


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CpuEvent(torch.cpu.Event):
    """An event that is always complete: CPU work is done when its call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def elapsed_time(self, end_event: _CpuEvent) -> float:
        """Return 0: nothing runs between two events."""
        return 0.0


class _CpuStream(torch.cpu.Stream):
    """The one stream of the CPU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def record_event(self, event: _CpuEvent | None = None) -> _CpuEvent:  # type: ignore[override]
        """Return a complete event."""
        return event or _CpuEvent()

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: torch.cpu.Stream) -> None:
        """Return at once."""

    def wait_event(self, event: _CpuEvent) -> None:
        """Return at once."""


def _import_megatron_uncompiled() -> None:
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compile_function


def _replace_runtime() -> None:
    stream = _CpuStream()
    replacements: dict[str, object] = {
        "Stream": _CpuStream,
        "Event": _CpuEvent,
        "current_device": _returning(lambda: "cpu"),
        "set_device": _returning(lambda: None),
        "synchronize": _returning(lambda: None),
        "empty_cache": _returning(lambda: None),
        "device": _returning(nullcontext),
        "stream": _returning(nullcontext),
        "current_stream": _returning(lambda: stream),
        "default_stream": _returning(lambda: stream),
        "memory_allocated": _returning(lambda: 0),
        "max_memory_allocated": _returning(lambda: 0),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


def _returning(make: Callable[[], object]) -> Callable[..., object]:
    """Return a new function on each call: torch's compiler refuses one function under two names."""

    def replacement(*args: object, **kwargs: object) -> object:
        return make()

    return replacement


def _replace_random_state() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def seed(value: int) -> None:
        torch.manual_seed(value)

    def get_state(device: object = None, **flags: bool) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: object = None, **flags: bool) -> None:
        torch.set_rng_state(state)

    torch.cuda.manual_seed = seed  # type: ignore[assignment]
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = get_state  # type: ignore[attr-defined]
        module.set_rng_state = set_state  # type: ignore[attr-defined]
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _replace_moves_to_host() -> None:
    """Convert token counts to plain numbers even if they are on the CPU already."""
    from megatron.core.transformer.moe import token_dispatcher

    def move(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _replace_uneven_exchanges() -> None:
    """Gather and scatter parts of different lengths, which NCCL supports and gloo does not.

    Expert-tensor ranks exchange tokens this way if experts are also split over expert ranks.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = (
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
    )

    def gather_uneven(
        part: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            even: torch.Tensor = gather(part, group, None, use_global_buffer)
            return even
        sizes = [int(size) for size in output_split_sizes]
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])

    def scatter_uneven(
        whole: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            even: torch.Tensor = reduce_scatter(whole, group, None, use_global_buffer)
            return even
        total = whole.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven
