"""What a `local` sandbox costs: boot, command, whole lives a second, files.

`python bench/sandbox.py [--json FILE]`: every isolator in turns on the same machine, beside a
bare `bwrap` that runs one program and is gone: the floor for anything with these namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.interfaces import Sandbox
from swerl.sandbox import Limits
from swerl.sandboxes import local

LIMITS = Limits(memory_mib=1024, disk_mib=512)
FILE_MIB = 100
NUM_FILES = 40
"""Files of the small repository, about as many as a generated task has."""
BARE = (
    *("bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "true"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table. Times are medians in milliseconds."""

    sandbox: str
    boot_ms: float
    """From the order to the end of the first command."""
    exec_ms: float = 0.0
    life_ms: float = 0.0
    """Open, two commands, write, read, close."""
    controller_ms: float = 0.0
    """CPU time of the controller's process for one such life."""
    lives_1: float = 0.0
    """Such lives a second, one after the other."""
    lives_4: float = 0.0
    lives_16: float = 0.0
    write_mib_s: float = 0.0
    read_mib_s: float = 0.0


async def measure(rounds: int) -> list[Cost]:
    """Measure every isolator on an empty and on a small workdir."""
    costs = []
    if shutil.which("bwrap"):
        costs.append(Cost("bare bwrap, one program", boot_ms=await median(rounds, bare)))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_FILES):
            Path(folder, f"{number}.py").write_text("x = 1\n" * 50)
        for isolator in ("bwrap", "unshare"):
            if isolator == "bwrap" and not shutil.which("bwrap"):
                continue
            for name, image in (("host", "host"), ("dir", f"dir:{folder}")):
                costs.append(await one(f"{isolator}, {name}", isolator, image, rounds))
    return costs


async def one(label: str, isolator: str, image: str, rounds: int) -> Cost:
    """Measure one isolator on one image."""
    backend = local.build(local.Options.model_validate({"isolator": isolator}))

    async def boot() -> None:
        async with backend.open(image, LIMITS, workdir="/testbed") as sandbox:
            await sandbox.run(["true"])

    async def life() -> None:
        async with backend.open(image, LIMITS, workdir="/testbed") as sandbox:
            await sandbox.run(["true"])
            await sandbox.write("/testbed/f", b"x" * 1000)
            await sandbox.read("/testbed/f")
            await sandbox.run(["true"])

    await life()
    spent = time.process_time()
    life_ms = await median(rounds, life)
    controller_ms = (time.process_time() - spent) * 1e3 / rounds
    async with backend.open(image, LIMITS, workdir="/testbed") as sandbox:
        exec_ms = await median(rounds, lambda: sandbox.run(["true"]))
        write_mib_s, read_mib_s = await files(sandbox)
    return Cost(
        sandbox=label,
        boot_ms=await median(rounds, boot),
        exec_ms=exec_ms,
        life_ms=life_ms,
        controller_ms=controller_ms,
        lives_1=await rate(rounds, 1, life),
        lives_4=await rate(rounds, 4, life),
        lives_16=await rate(rounds, 16, life),
        write_mib_s=write_mib_s,
        read_mib_s=read_mib_s,
    )


async def bare() -> None:
    """Run one program in a bubblewrap of its own."""
    process = await asyncio.create_subprocess_exec(*BARE)
    assert await process.wait() == 0


async def median(rounds: int, step: Callable[[], Awaitable[object]]) -> float:
    """Return the median of a step's milliseconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        await step()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


async def rate(rounds: int, num_workers: int, life: Callable[[], Awaitable[None]]) -> float:
    """Return lives a second with so many at once."""
    free = asyncio.Semaphore(num_workers)

    async def limited() -> None:
        async with free:
            await life()

    num_lives = max(rounds, num_workers * 2)
    started = time.perf_counter()
    await asyncio.gather(*(limited() for _ in range(num_lives)))
    return num_lives / (time.perf_counter() - started)


async def files(sandbox: Sandbox) -> tuple[float, float]:
    """Return MiB a second for writing and for reading one big file."""
    data = bytes(FILE_MIB << 20)
    started = time.perf_counter()
    await sandbox.write("/tmp/big", data)
    written = time.perf_counter()
    assert len(await sandbox.read("/tmp/big")) == len(data)
    return FILE_MIB / (written - started), FILE_MIB / (time.perf_counter() - written)


def show(costs: list[Cost]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("sandbox", "boot ms", "exec ms", "life ms", "own CPU ms")
    for column in ("lives/s x1", "x4", "x16", "write MiB/s", "read MiB/s"):
        table.add_column(column, justify="right")
    for cost in costs:
        label, *figures = asdict(cost).values()
        table.add_row(label, *(f"{figure:.1f}" if figure else "" for figure in figures))
    Console().print(table)


def main() -> None:
    """Read the command line, measure, show, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    costs = asyncio.run(measure(options.rounds))
    show(costs)
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
        sys.stdout.write(f"written to {options.json}\n")


if __name__ == "__main__":
    main()
