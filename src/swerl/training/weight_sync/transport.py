"""Carry weights to engine servers: flat buckets, HTTP calls, and a broadcast group.

A bucket is one byte tensor with the tensors of one type in it, end to end: one handle and one
broadcast instead of thousands. Only its handle travels by HTTP. SGLang unpickles a handle with a
list of permitted classes, and reads the tensors' positions by attribute. So a plain namespace
replaces its `FlattenedTensorMetadata`, and the sender needs no SGLang.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import base64
import io
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as torch_multiprocessing
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions

from swerl.core.chat import Json
from swerl.core.learning import EngineTarget

_DEVICE = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`."""
_group_numbers = count()


class CallError(Exception):
    """A server refused a call; or, with `gone`, did not answer."""

    def __init__(self, message: str, *, gone: bool) -> None:
        super().__init__(message)
        self.gone = gone


class Caller:
    """Post to servers from threads; a call ends after `timeout_s`."""

    def __init__(self, num_servers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_workers=max(num_servers, 1))

    def start(self, url: str, path: str, body: Mapping[str, Json]) -> Future[None]:
        """Begin a call; the future fails with CallError."""
        return self._threads.submit(_post, url + path, body, self.timeout_s)

    def close(self) -> None:
        """Accept no more calls; those in flight end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def failures(calls: Mapping[str, Future[None]]) -> dict[str, CallError]:
    """Wait for all calls, by URL; return the errors, by URL."""
    errors = {}
    for url, call in calls.items():
        # `exception` waits until the call has ended.
        error = call.exception()
        if isinstance(error, CallError):
            errors[url] = error
        elif error is not None:
            raise error
    return errors


def _post(url: str, body: Mapping[str, Json], timeout_s: float) -> None:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    # Engines are never behind a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data, headers)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            response.read()
    except urllib.error.HTTPError as error:
        body_text = error.read(500).decode(errors="replace")
        raise CallError(f"{url} answered {error.code}: {body_text}", gone=False) from error
    except (OSError, TimeoutError) as error:
        raise CallError(f"{url} did not answer: {error}", gone=True) from error


class GroupError(Exception):
    """Servers of a group failed, each with a reason. The group must be closed."""

    def __init__(self, reasons: Mapping[str, CallError]) -> None:
        super().__init__("; ".join(map(str, reasons.values())))
        gone = {url: str(error) for url, error in reasons.items() if error.gone}
        self.gone = gone
        """URL -> reason, of the servers that do not answer."""
        self.culprits = gone or {url: str(error) for url, error in reasons.items()}
        """Servers to leave out; one that is gone makes the others fail, so only it is named."""


class EngineGroup:
    """The process group in which the trainer's first rank broadcasts to engine ranks.

    Rank 0 is the trainer; each server's ranks follow, in the order of the servers. `join` forms the
    group. It lasts from update to update until a member fails: a broadcast that a member missed can
    only be abandoned together with the group.
    """

    def __init__(self, targets: Sequence[EngineTarget], caller: Caller) -> None:
        self.targets = tuple(targets)
        self._caller = caller
        self._name = f"swerl-{os.getpid()}-{next(_group_numbers)}"
        self._group: dist.ProcessGroup | None = None

    def join(self) -> None:
        """Form the group together with every server. Raises GroupError."""
        patience = timedelta(seconds=self._caller.timeout_s)
        host = _address_towards(self.targets[0].url)
        # With port 0 the system chooses a free one.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, is_master=True, wait_for_workers=False, timeout=patience
        )
        world_size = 1 + sum(target.num_ranks for target in self.targets)
        backend = "nccl" if self.targets[0].device == "cuda" else "gloo"
        calls, rank = {}, 1
        for target in self.targets:
            body: dict[str, Json] = {
                "master_address": host,
                "master_port": store.port,
                "rank_offset": rank,
                "world_size": world_size,
                "group_name": self._name,
                "backend": backend,
            }
            # Calls start before this rank joins, because no member can join alone.
            calls[target.url] = self._caller.start(target.url, "/init_weights_update_group", body)
            rank += target.num_ranks
        # Joining blocks until all members are there, so look first for a server that refuses.
        wait(calls.values(), timeout=0.2, return_when=FIRST_EXCEPTION)
        refused = {url: call for url, call in calls.items() if call.done() and call.exception()}
        if refused:
            raise GroupError(failures(refused))
        try:
            self._group = _new_group(store, world_size, self._name, backend, patience)
        except RuntimeError as error:
            late = CallError(f"the group did not come together: {error}", gone=False)
            wrong = failures(calls) or {target.url: late for target in self.targets}
            raise GroupError(wrong) from error
        if wrong := failures(calls):
            raise GroupError(wrong)

    def broadcast(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send one bucket to all. Raises GroupError with the servers that failed."""
        assert self._group is not None
        body: dict[str, Json] = {
            "names": list(bucket.names),
            "dtypes": [bucket.dtype] * len(bucket.names),
            "shapes": list(bucket.shapes),
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        calls = {target.url: self._caller.start(target.url, path, body) for target in self.targets}
        # Asynchronous: a server that fails must not block this rank inside the broadcast.
        sent = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        wait(calls.values(), return_when=FIRST_EXCEPTION)
        if any(call.done() and call.exception() for call in calls.values()):
            self._abort()  # else the others wait for ever
            raise GroupError(failures(calls))
        sent.wait()

    def close(self) -> None:
        """Leave the group, and ask the servers to leave it."""
        if self._group is not None:
            with suppress(RuntimeError):
                dist.destroy_process_group(self._group)
        self._group = None
        body = {"group_name": self._name}
        calls = {
            target.url: self._caller.start(target.url, "/destroy_weights_update_group", body)
            for target in self.targets
        }
        # Wait, but ignore the errors: a server that is gone has left.
        failures(calls)

    def _abort(self) -> None:
        assert self._group is not None
        with suppress(RuntimeError):
            self._group.abort()


def _new_group(
    store: c10d.Store, size: int, name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Form a group of processes that share no default group, as SGLang does on its side.

    torch has no public function for that; SGLang's `init_custom_process_group` uses the same one.
    """
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    # `dist.broadcast` looks up the ranks of a group in this table.
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    assert isinstance(group, dist.ProcessGroup)
    return group


def _address_towards(url: str) -> str:
    """Return this machine's address as the server at `url` sees it."""
    host, _, port = url.rpartition("//")[2].partition("/")[0].rpartition(":")
    family, kind, proto, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing, but chooses the local address.
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one type, sent together."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> str:
        return str(self.tensors[0].dtype).removeprefix("torch.")

    @property
    def shapes(self) -> list[Json]:
        return [list(tensor.shape) for tensor in self.tensors]

    def flat(self) -> torch.Tensor:
        return torch.cat(
            [tensor.contiguous().view(-1).view(torch.uint8) for tensor in self.tensors]
        )


def in_buckets(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Yield the tensors in buckets of at most `max_bytes`; a larger tensor has its own bucket."""
    # A bucket has tensors of one type, so one bucket for each type is open.
    buckets: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        pieces = buckets.setdefault(tensor.dtype, [])
        if pieces and sum(piece.nbytes for _, piece in pieces) + tensor.nbytes > max_bytes:
            yield _bucket(pieces)
            pieces.clear()
        pieces.append((name, tensor))
    yield from (_bucket(pieces) for pieces in buckets.values() if pieces)


def handle(bucket: Bucket, flat: torch.Tensor) -> str:
    """Return the handle by which another process opens `flat`, in SGLang's `flattened_bucket` form.

    On a CPU `flat` moves into shared memory. The memory must not be reused before the other process
    has answered.
    """
    if not flat.is_cuda:
        # Named files: only children could get a file descriptor from this process.
        torch_multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        flat.share_memory_()  # type: ignore[no-untyped-call]
    value = {"flattened_tensor": flat, "metadata": list(_places(bucket))}
    written = io.BytesIO()
    _Pickler(written).dump(value)
    return base64.b64encode(written.getvalue()).decode()


def gpu_uuid() -> str:
    """Return the uuid of this process's GPU, which names it in every process."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class _Pickler(ForkingPickler):
    """Pickles a GPU's uuid instead of its number, which differs between processes."""

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
            # The flat tensor has bytes, so `numel` counts bytes too.
            numel=tensor.nbytes,
        )
        start += tensor.nbytes


def _bucket(tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(tuple(name for name, _ in tensors), tuple(tensor for _, tensor in tensors))
