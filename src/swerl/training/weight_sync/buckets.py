"""Weights in flat buckets, and the form in which a bucket's memory is handed to SGLang.

A bucket is one byte tensor with the tensors of one type in it, end to end: one handle to open and
one broadcast, instead of thousands. Only its handle travels by HTTP. SGLang unpickles a handle with
a list of permitted classes; it reads the places of the tensors by attribute, so that a plain
namespace serves for its `FlattenedTensorMetadata`, and the sender needs no SGLang.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from swerl.core.chat import Json

_DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one type."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> str:
        """Their type, by torch's name."""
        return str(self.tensors[0].dtype).removeprefix("torch.")

    @property
    def shapes(self) -> list[Json]:
        """Their shapes."""
        return [list(tensor.shape) for tensor in self.tensors]

    def flat(self) -> torch.Tensor:
        """Return their bytes end to end, in memory of their own."""
        return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in self.tensors])


def in_buckets(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Yield the tensors in buckets of at most `max_bytes`; a larger one fills a bucket alone."""
    open_ones: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        held = open_ones.setdefault(tensor.dtype, [])
        if held and sum(each.nbytes for _, each in held) + tensor.nbytes > max_bytes:
            yield _bucket(held)
            held.clear()
        held.append((name, tensor))
    yield from (_bucket(held) for held in open_ones.values() if held)


def handle(bucket: Bucket, flat: torch.Tensor) -> str:
    """Return what lets another process open `flat`, as SGLang's `flattened_bucket` wants it.

    On a CPU `flat` moves into shared memory. The memory must not be used otherwise before the other
    process has said that it is done.
    """
    if not flat.is_cuda:
        # Named files: a file descriptor could only be had from this process by its children.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        flat.share_memory_()  # type: ignore[no-untyped-call]
    told = {"flattened_tensor": flat, "metadata": list(_places(bucket))}
    written = io.BytesIO()
    _Pickler(written).dump(told)
    return base64.b64encode(written.getvalue()).decode()


def gpu_uuid() -> str:
    """Return the name of this process's GPU that holds in every process."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class _Pickler(ForkingPickler):
    """Writes a GPU's uuid for its number, which differs where processes see other GPUs."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        changed = list(arguments)
        changed[_DEVICE] = gpu_uuid()
        return rebuild, tuple(changed)


def _places(bucket: Bucket) -> Iterator[SimpleNamespace]:
    start = 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        yield SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=start,
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,
        )
        start += tensor.nbytes


def _bucket(held: list[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(tuple(name for name, _ in held), tuple(tensor for _, tensor in held))
