"""The process group by which the trainer's first rank broadcasts weights to engine ranks.

Rank 0 is the trainer; each server's ranks follow, in the order of the servers. The group lives on
from update to update until one of its members fails; a broadcast that a member missed can only be
given up together with the group.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from swerl.core.chat import Json
from swerl.core.learning import EngineTarget
from swerl.training.weight_sync.buckets import Bucket
from swerl.training.weight_sync.http import Caller, CallError, addresses, failures

_numbers = count()


class GroupError(Exception):
    """Servers that failed in a group, each with the reason. The group must be closed now."""

    def __init__(self, reasons: Mapping[str, CallError]) -> None:
        super().__init__("; ".join(map(str, reasons.values())))
        gone = {url: str(error) for url, error in reasons.items() if error.gone}
        self.gone = gone
        """URL -> reason, of those that answer no more."""
        self.culprits = gone or {url: str(error) for url, error in reasons.items()}
        """Whom to leave out: who is gone made the others fail."""


class EngineGroup:
    """A live group with these servers in it; make one with `join`."""

    def __init__(self, targets: Sequence[EngineTarget], caller: Caller) -> None:
        self.targets = tuple(targets)
        self._caller = caller
        self._name = f"swerl-{os.getpid()}-{next(_numbers)}"
        self._group: dist.ProcessGroup | None = None

    def join(self) -> None:
        """Make the group together with every server. Raises GroupError."""
        patience = timedelta(seconds=self._caller.timeout_s)
        host = _address_towards(self.targets[0].url)
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
            calls[target.url] = self._caller.start(target.url, "/init_weights_update_group", body)
            rank += target.num_ranks
        # Joining blocks until all have come: one that refuses at once is known before.
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
        """Send one bucket to all. Raises GroupError, with whom it could not be sent to."""
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
        calls = {each.url: self._caller.start(each.url, path, body) for each in self.targets}
        sent = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        wait(calls.values(), return_when=FIRST_EXCEPTION)
        if any(call.done() and call.exception() for call in calls.values()):
            self._abort()  # the others wait for a broadcast that will not come
            raise GroupError(failures(calls))
        sent.wait()

    def close(self) -> None:
        """Leave the group; servers that live are told to leave it, too."""
        if self._group is not None:
            with suppress(RuntimeError):
                dist.destroy_process_group(self._group)
        self._group = None
        body = {"group_name": self._name}
        calls = {
            each.url: self._caller.start(each.url, "/destroy_weights_update_group", body)
            for each in self.targets
        }
        failures(calls)

    def _abort(self) -> None:
        assert self._group is not None
        with suppress(RuntimeError):
            self._group.abort()


def _new_group(
    store: c10d.Store, size: int, name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group of processes that share no default group, the way SGLang makes its side.

    torch has no public call for that; SGLang's `init_custom_process_group` uses the same.
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
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    assert isinstance(group, dist.ProcessGroup)
    return group


def _address_towards(url: str) -> str:
    """Return this machine's address as the server at `url` sees it."""
    (host, port), *_ = addresses([url])
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
