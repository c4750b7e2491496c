"""Send the trainer's weights to engines: gather the tensors, pass on bucket after bucket.

Every rank gathers. By `tensor` each server opens the buckets in shared memory: the GPU's if a
trainer rank and an engine rank use the same GPU, else the machine's. By `distributed` the first
rank broadcasts them. A server that fails is left out and reported; a failed broadcast starts again
with the remaining servers. The controller opens and closes the update at each server.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from swerl.core.chat import Json
from swerl.core.learning import EngineTarget, Sent
from swerl.engines._weights import shards
from swerl.training.weight_sync.checksum import ExpectedChecksums
from swerl.training.weight_sync.transport import (
    Bucket,
    Caller,
    EngineGroup,
    GroupError,
    failures,
    gpu_uuid,
    handle,
    in_buckets,
)

Gather = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields whole Hugging Face tensors; all ranks call it together and exhaust it."""

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Sender:
    """One rank's part in sending; it keeps the broadcast group between updates.

    `max_bytes` limits a bucket, `timeout_s` the time that a server may take for one.
    """

    def __init__(
        self,
        gather: Gather,
        hf_config: Mapping[str, Json],
        dtypes: Mapping[str, torch.dtype],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        self._gather = gather
        self._hf_config = hf_config
        self._dtypes = dtypes
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._group: EngineGroup | None = None

    def send(self, targets: Sequence[EngineTarget], way: str, version: str) -> Sent:
        """Send all weights by `tensor` or `distributed`. All ranks call it together."""
        # One thread for each server, so that a slow one does not delay calls to the others.
        delivery = _Delivery(targets, Caller(len(targets), self._timeout_s))
        try:
            if way == "tensor":
                self._pass(delivery, delivery.share)
            else:
                self._broadcast(delivery)
        finally:
            delivery.caller.close()
        return delivery.sent(version)

    def close(self) -> None:
        if self._group:
            self._group.close()
        self._group = None

    def _broadcast(self, delivery: _Delivery) -> None:
        """Broadcast all weights; start again while members fail and others remain."""
        while True:
            broken = [self._try_broadcast(delivery)]
            # The gather is collective: all ranks repeat it, or none does.
            dist.broadcast_object_list(broken, src=0)
            if not broken[0]:
                return

    def _try_broadcast(self, delivery: _Delivery) -> bool:
        """Return whether a member failed and others still need the weights."""
        group_before = self._group
        # Only the first rank shares a group with the engines.
        group = self._join(delivery) if dist.get_rank() == 0 else None
        broken = dist.get_rank() == 0 and group is None

        def deliver(bucket: Bucket) -> None:
            nonlocal broken
            # After a failure the gather continues without sending: the other ranks wait in it.
            if group is None or broken:
                return
            try:
                group.broadcast(bucket, bucket.flat().to(delivery.device))
            except GroupError as error:
                broken = True
                # An old group lacks restarted servers, so only servers that are gone are lost.
                delivery.lose(error.gone if group is group_before else error.culprits)
                self.close()

        self._pass(delivery, deliver)
        return broken and bool(delivery.alive)

    def _join(self, delivery: _Delivery) -> EngineGroup | None:
        """Return the group of the remaining servers; None if one did not join."""
        targets = tuple(delivery.alive)
        # The group of the last update serves again if no server was added or lost.
        if self._group and self._group.targets == targets:
            return self._group
        self.close()
        if not targets:
            return None
        group = EngineGroup(targets, Caller(len(targets), self._timeout_s))
        try:
            group.join()
        except GroupError as error:
            delivery.lose(error.culprits)
            group.close()
            return None
        self._group = group
        return group

    def _pass(self, delivery: _Delivery, deliver: Callable[[Bucket], None]) -> None:
        """Gather all weights once, to the end: the other ranks take part in every tensor."""
        # All targets are expected to have the layout of the first.
        expected = ExpectedChecksums(delivery.targets[0], self._hf_config)
        first, num_tensors = dist.get_rank() == 0, 0
        for bucket in in_buckets(self._typed(), self._max_bytes):
            num_tensors += len(bucket.names)
            # The first rank alone reports, so the others need no checksums.
            if first:
                for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                    expected.add(name, tensor)
            deliver(bucket)
        delivery.note(expected, num_tensors)

    def _typed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._gather():
            # Engines expect the types of the model's own files, which may differ from training's.
            yield name, tensor.detach().to(self._dtypes.get(name, tensor.dtype))


class _Delivery:
    """One update: its servers, the failed ones, and the checksums expected after it."""

    def __init__(self, targets: Sequence[EngineTarget], caller: Caller) -> None:
        self.targets = targets
        self.caller = caller
        self.alive = list(targets)
        self.device = targets[0].device
        self._reasons: dict[str, str] = {}
        self._checksums: tuple[Mapping[str, tuple[str, ...]], ...] = ()
        self._certain: frozenset[str] = frozenset()
        self._num_tensors = 0

    def lose(self, reasons: Mapping[str, str]) -> None:
        self._reasons |= reasons
        self.alive = [target for target in self.alive if target.url not in self._reasons]

    def note(self, expected: ExpectedChecksums, num_tensors: int) -> None:
        self._checksums, self._certain = expected.checksums, expected.certain
        self._num_tensors = num_tensors

    def sent(self, version: str) -> Sent:
        return Sent(version, self._num_tensors, self._reasons, self._checksums, self._certain)

    def share(self, bucket: Bucket) -> None:
        """Let every server open a bucket; return when all have copied it."""
        # `_flat` is the handles' memory: it must live until the servers have copied it.
        _flat, handles = self._handles(bucket)
        if dist.get_rank() == 0:
            calls = {}
            for target in self.alive:
                try:
                    texts = handles_of(target, handles)
                except LookupError as error:
                    self.lose({target.url: str(error.args[0])})
                    continue
                body: dict[str, Json] = {
                    "serialized_named_tensors": list(texts),
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                path = "/update_weights_from_tensor"
                calls[target.url] = self.caller.start(target.url, path, body)
            self.lose({url: str(error) for url, error in failures(calls).items()})
        if self.device == "cuda":
            dist.barrier()  # every rank's memory has been read

    def _handles(self, bucket: Bucket) -> tuple[torch.Tensor | None, list[RankHandle]]:
        """Return a bucket's memory and its handles: one on a CPU, on GPUs one per trainer rank."""
        if self.device == "cpu":
            if dist.get_rank():
                return None, []
            flat = bucket.flat()
            return flat, [RankHandle(handle(bucket, flat))]
        flat = bucket.flat().cuda()
        handles: list[RankHandle | None] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, RankHandle(handle(bucket, flat), gpu_uuid()))
        return flat, [handle for handle in handles if handle]


@dataclass(frozen=True, slots=True)
class RankHandle:
    """A bucket in the memory of one trainer rank."""

    text: str
    gpu: str = ""
    """Uuid of the rank's GPU; empty on a CPU, where one handle serves everybody."""


def handles_of(target: EngineTarget, handles: Sequence[RankHandle]) -> list[str]:
    """Return the handle that each rank of a server opens: of the trainer rank on the same GPU.

    If the server's GPUs are unknown, all servers of the pool follow the order of the trainer's
    ranks, each with `num_ranks` GPUs. Raises LookupError if no trainer rank shares a GPU.
    """
    if target.device == "cpu":
        return [handles[0].text] * target.num_ranks
    if not target.gpus:
        first = target.place * target.num_ranks
        if first + target.num_ranks > len(handles):
            raise LookupError(f"no trainer rank shares the GPUs of server {target.place + 1}")
        return [handle.text for handle in handles[first : first + target.num_ranks]]
    by_gpu = {handle.gpu: handle.text for handle in handles}
    missing = [gpu for gpu in target.gpus if gpu not in by_gpu]
    if missing:
        raise LookupError(f"no trainer rank uses its GPU {missing[0]}")
    return [by_gpu[gpu] for gpu in target.gpus]


def stored_dtypes(model: Path) -> dict[str, torch.dtype]:
    """Return the type of every floating tensor in a model folder's files."""
    dtypes = {}
    for path in shards(model):
        with path.open("rb") as file:
            # A safetensors file begins with the length of its JSON header, in 8 bytes.
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _TYPES:
                dtypes[name] = _TYPES[entry["dtype"]]
    return dtypes
