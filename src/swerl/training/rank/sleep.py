"""Lend a rank's GPU memory to the engine: keep its tensors in host memory between steps.

A sleeping tensor keeps its identity: its storage is copied to the host and shrunk to no bytes in
place, so every view of it (Megatron's buffers, shards, master copies) is valid again when the
storage has grown back. Gradients are not copied. Weights and checkpoints are read from the host
copy, so sending them takes one tensor of GPU memory at a time.

NCCL's communicators keep their memory. `torch.distributed.Backend.suspend` frees what they
allocated by cuMem, which the ranks turn off as SGLang does; meanwhile weights are sent over them.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

_ALIGNED = 512
"""Bytes; a multiple of every type's size, as in CUDA's allocator."""

Tensors = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Sleeping:
    """A storage without memory."""

    storage: torch.UntypedStorage
    num_bytes: int
    start: int | None
    """Start of its bytes in the host's block; None if they are not kept."""


class RankMemory:
    """The tensors of one rank on one device, awake or asleep.

    `kept` yields the tensors to bring back, `dropped` those that are zero after a sleep. Both are
    called at each sleep, because an optimizer builds its state in the first step.
    """

    def __init__(self, device: torch.device, kept: Tensors, dropped: Tensors) -> None:
        self._device = device
        self._kept = kept
        self._dropped = dropped
        self._host: torch.Tensor | None = None
        """The block of bytes that holds everything asleep; it is kept for the next sleep."""
        self._asleep: dict[int, _Sleeping] = {}
        """By the identity of the storage; empty while awake."""

    def sleep(self) -> None:
        """Copy what must be kept to the host, and free all memory on the device."""
        if self._asleep:
            return
        kept, dropped = self._storages(self._kept()), self._storages(self._dropped())
        start = 0
        for key, storage in kept.items():
            self._asleep[key] = _Sleeping(storage, storage.nbytes(), start)
            start += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        for key, storage in dropped.items():
            self._asleep.setdefault(key, _Sleeping(storage, storage.nbytes(), None))
        if self._host is None or self._host.numel() != start:
            if self._host is not None:
                _unpin(self._host, self._device)
            self._host = _pinned(start, self._device)
        for each in self._asleep.values():
            if each.start is not None:
                self._bytes_of(each).copy_(_flat(each.storage), non_blocking=True)
        _synchronize(self._device)
        for each in self._asleep.values():
            each.storage.resize_(0)
        empty_allocator()

    def wake(self) -> None:
        """Take the memory back, with every kept byte as it was."""
        for storage in self._asleep.values():
            storage.storage.resize_(storage.num_bytes)
            if storage.start is None:
                _flat(storage.storage).zero_()
            else:
                _flat(storage.storage).copy_(self._bytes_of(storage), non_blocking=True)
        _synchronize(self._device)
        self._asleep = {}

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's value: itself, or while it sleeps a view of its copy on the host.

        The view is valid until the next sleep.
        """
        copy = self._asleep.get(tensor.untyped_storage()._cdata)
        if copy is None or copy.start is None:
            return tensor
        values = self._bytes_of(copy).view(tensor.dtype)
        start = values.storage_offset() + tensor.storage_offset()
        return values.as_strided(tensor.shape, tensor.stride(), start)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's value on the device; a sleeping one is copied there."""
        return self.read(tensor).to(self._device)

    def _bytes_of(self, each: _Sleeping) -> torch.Tensor:
        assert self._host is not None and each.start is not None
        return self._host[each.start : each.start + each.num_bytes]

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return the storages of this device, each once: most tensors are views of few."""
        storages = (
            item.untyped_storage() for item in tensors if item.device.type == self._device.type
        )
        return {item._cdata: item for item in storages if item.nbytes() and item.resizable()}


def empty_allocator() -> None:
    """Return the memory of freed tensors to the driver: another process cannot use a cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory that the GPU copies at full speed.

    torch's own pinned memory would round the block up to a power of two.
    """
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda" and num_bytes:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    return block


def _unpin(block: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda" and block.numel():
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostUnregister(block.data_ptr()))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
