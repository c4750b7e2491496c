"""An all-reduce over the ranks that a run will have, and how fast it is.

The controller's side; `_allreduce_rank.py` is what each rank runs.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swerl.cluster.finding import Finding, State, judged
from swerl.cluster.network import free_port
from swerl.cluster.node import PYTHON, Node, Order, Running
from swerl.core.errors import ClusterError

ALL_REDUCE_S = 300.0
"""Seconds until it must be over; NCCL alone takes up to a minute to set up on many machines."""


async def check_collective(
    nodes: Sequence[Node], num_ranks: int, folder: Path, *, threads: int
) -> list[Finding]:
    """Run one rank a GPU (or CPU process) on the nodes, and judge sum and speed."""
    where, name = "all" if len(nodes) > 1 else nodes[0].name, "all-reduce"
    each = num_ranks // len(nodes)
    log = (folder / "preflight" / "all-reduce.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    first = nodes[0]
    running: list[Running] = []
    try:
        port = await first.call(free_port, first.address)
        for rank in range(num_ranks):
            node = nodes[rank // each]
            told = {
                "rank": rank,
                "ranks": num_ranks,
                "store": f"tcp://{first.address}:{port}",
                "address": node.address,
                "threads": threads,
            }
            place = rank % each
            gpu = {"CUDA_VISIBLE_DEVICES": node.gpus[place]} if place < len(node.gpus) else {}
            argv = (PYTHON, "-m", "swerl.cluster._allreduce_rank", json.dumps(told))
            running.append(await node.start(Order(argv, log, env=gpu)))
        deaths = [process.ended for process in running]
        await asyncio.wait(deaths, timeout=ALL_REDUCE_S, return_when=asyncio.ALL_COMPLETED)
    except (ClusterError, OSError) as error:
        mend = getattr(error, "hint", "") or f"{first.address} is no address of {first.name}"
        return [judged(where, name, str(error), good=False, mend=mend)]
    finally:
        for process in running:
            if not process.ended.done():
                await process.signal(signal.SIGKILL)
    ends = [str(each.result()) if each.done() else "hangs" for each in deaths]
    bad = [f"rank {rank}: {end}" for rank, end in enumerate(ends) if end != "exit code 0"]
    said = _last_line(log)
    if bad or said is None:
        mend = f"do the machines reach each other on every port? Its log is {log}"
        return [judged(where, name, "; ".join(bad[:4]) or "no answer", good=False, mend=mend)]
    log.unlink(missing_ok=True)
    return [Finding(where, name, State.OK, said)]


def _last_line(log: Path) -> str | None:
    with suppress(OSError):
        for line in reversed(log.read_text(errors="replace").splitlines()):
            if line.startswith("all-reduce: "):
                return line.removeprefix("all-reduce: ")
    return None
