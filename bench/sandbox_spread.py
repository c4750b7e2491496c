"""What sandboxes on a cluster's machines cost: `local` directly, and through the run's own servers.

    python bench/sandbox_spread.py [--servers 2] [--json FILE]

The servers are processes of this machine, so their work and the client's share its cores, and the
network is the loopback. Both ways take turns, so that other work on the machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from swerl.cluster.node import LocalNode
from swerl.cluster.sandbox_servers import serve_sandboxes
from swerl.core.contracts import SandboxBackend
from swerl.core.events import ignore
from swerl.core.sandbox import Limits
from swerl.recipe.schema import Recipe
from swerl.sandboxes import local

NUM_LIVES = 20
NUM_RUNS = 10
NUM_TOGETHER = 32
MIB = 1 << 20
RECIPE = Recipe.model_validate({"name": "bench", "rollout": {"concurrency": NUM_TOGETHER}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args.servers))
    print(f"{'median':>20} {'local':>10} {'spread':>10}   load average {os.getloadavg()[0]:.0f}")
    for name, (direct, spread) in found.items():
        print(f"{name:>20} {direct:10.1f} {spread:10.1f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


async def measure(num_servers: int) -> dict[str, tuple[float, float]]:
    """Return each figure's medians, direct and spread."""
    nodes = [LocalNode(name=f"n{number}") for number in range(num_servers)]
    with tempfile.TemporaryDirectory() as logs:
        async with serve_sandboxes(nodes, RECIPE, logs=Path(logs), emit=ignore) as spread:
            ways: list[SandboxBackend] = [local.build(local.Options()), spread]
            times: list[dict[str, list[float]]] = [defaultdict(list) for _ in ways]
            for _ in range(NUM_LIVES):
                for way, found in zip(ways, times, strict=True):
                    await live(way, found)
            for way, found in zip(ways, times, strict=True):
                await live_together(way, found)
    direct, over = ({name: statistics.median(all) for name, all in each.items()} for each in times)
    return {name: (direct[name], over[name]) for name in direct}


async def live(backend: SandboxBackend, found: dict[str, list[float]]) -> None:
    """Live one sandbox's life; times in milliseconds."""
    began = clock_ms()
    async with backend.open("host", Limits(), workdir="/w") as sandbox:
        await sandbox.run(["true"])
        found["open + command, ms"].append(clock_ms() - began)
        for _ in range(NUM_RUNS):
            began = clock_ms()
            await sandbox.run(["true"])
            found["command, ms"].append(clock_ms() - began)
        began = clock_ms()
        await sandbox.write("/w/file", bytes(MIB))
        found["write 1 MiB, ms"].append(clock_ms() - began)
        began = clock_ms()
        await sandbox.read("/w/file")
        found["read 1 MiB, ms"].append(clock_ms() - began)
        began = clock_ms()
    found["close, ms"].append(clock_ms() - began)


async def live_together(backend: SandboxBackend, found: dict[str, list[float]]) -> None:
    """Hold many sandboxes at once; times in seconds."""
    async with AsyncExitStack() as stack:
        began = clock_ms()
        contexts = [backend.open("host", Limits(), workdir="/w") for _ in range(NUM_TOGETHER)]
        opened = await asyncio.gather(*map(stack.enter_async_context, contexts))
        found[f"open {NUM_TOGETHER}, s"].append((clock_ms() - began) / 1e3)
        began = clock_ms()
        await asyncio.gather(*(sandbox.run(["true"]) for sandbox in opened))
        found[f"command in {NUM_TOGETHER}, s"].append((clock_ms() - began) / 1e3)


def clock_ms() -> float:
    return time.perf_counter() * 1e3


if __name__ == "__main__":
    main()
