"""One rank of the preflight's all-reduce: `python -m swerl.cluster._allreduce_rank SETTINGS`.

It exits with an error if the sum is wrong. The reported speed is the bus bandwidth of nccl-tests:
bytes per second times 2 (n - 1) / n, which does not depend on the number of ranks n.
"""

# heavy imports: this file only runs in processes of its own

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from swerl.cluster.node import interface_of

GPU_BYTES = 1 << 28
CPU_BYTES = 1 << 24
ROUNDS = 5
JOIN = timedelta(seconds=240)


def main() -> None:
    """Join the other ranks, sum, check and measure; rank 0 prints the result."""
    settings = json.loads(sys.argv[1])
    rank, num_ranks = settings["rank"], settings["ranks"]
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(settings["threads"])
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface_of(settings["address"]))
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, init_method=settings["store"], rank=rank, world_size=num_ranks, timeout=JOIN
    )
    size = GPU_BYTES if on_gpu else CPU_BYTES
    values = torch.full((size // 4,), float(rank), device="cuda" if on_gpu else "cpu")
    dist.all_reduce(values)
    # The ranks contribute 0 to n - 1.
    expected = num_ranks * (num_ranks - 1) / 2
    if not bool((values == expected).all()):
        sys.exit(f"the sum is {values[0].item()}, not {expected}")
    seconds = _measure(values, on_gpu)
    if rank == 0:
        gib_s = size * 2 * (num_ranks - 1) / num_ranks / seconds / 2**30
        speed = f"{gib_s:,.2f} GiB/s bus bandwidth" if num_ranks > 1 else "one rank, no network"
        print(f"all-reduce: {backend}, {num_ranks} ranks, {size >> 20} MiB: {speed}")  # noqa: T201
    dist.destroy_process_group()


def _measure(values: torch.Tensor, on_gpu: bool) -> float:
    """Return the mean seconds of an all-reduce."""
    # Without a barrier, the first rank would measure the start of the last.
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    # CUDA works asynchronously.
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / ROUNDS


if __name__ == "__main__":
    main()
