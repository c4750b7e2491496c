"""What the ledger costs: a sandbox that takes no time, with and without it, and reading it back.

`python bench/ledger.py [--json FILE] [--sandboxes 20000] [--processes 200]`. One process opens
many sandboxes one after the other; then the ledger also gets the files of many dead processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from swerl.core.contracts import SandboxBackend
from swerl.core.liveness import this_process
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.sandboxes.ledger.bill import bill
from swerl.sandboxes.ledger.entry import Entry, Head
from swerl.sandboxes.ledger.lines import entry_lines, head_line
from swerl.sandboxes.ledger.records import Records
from swerl.sandboxes.ledger.store import Ledger
from swerl.sandboxes.ledger.tracked import Tracked

LIMITS = Limits()
IMAGE = "registry.example/swebench/sweb.eval.x86_64.some__repository-12345:latest"


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured."""

    sandboxes: int
    bare_us: float
    """Microseconds of one sandbox without the ledger."""
    tracked_us: float
    slowest_ms: float
    """The slowest sandbox: it waited until the ended ones were added up."""
    file_kib: float
    """Size of the process's file after all of them."""
    dead_processes: int
    read_ms: float
    """Reading every file, as `ps` does."""
    bill_ms: float
    archive_ms: float
    """Moving the files of dead processes into the archive, once."""
    bill_after_ms: float


class Sandbox:
    """Does nothing."""

    id = "sandbox-0123456789"


class Backend:
    """Makes sandboxes in no time."""

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        yield Sandbox()

    async def live(self) -> Sequence[LiveSandbox]:
        return []

    async def remove(self, name: str) -> None:
        return

    def price(self, limits: Limits) -> float:
        return 0.08


async def open_all(backend: SandboxBackend, count: int) -> list[float]:
    """Open and close sandboxes; return the seconds of each."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        async with backend.open(IMAGE, LIMITS, workdir="/testbed"):
            pass
        times.append(time.perf_counter() - began)
    return times


def measure(folder: Path, num_sandboxes: int, num_processes: int) -> Costs:
    """Measure everything in an empty folder."""
    ledger = Ledger(folder)
    tracked = Tracked(Backend(), Records(ledger, "local", {}, run="bench"))  # type: ignore[arg-type]
    bare = asyncio.run(open_all(Backend(), num_sandboxes))  # type: ignore[arg-type]
    times = asyncio.run(open_all(tracked, num_sandboxes))
    (file,) = folder.glob("*.jsonl")
    size = file.stat().st_size
    write_dead(folder, num_processes)
    return Costs(
        sandboxes=num_sandboxes,
        bare_us=sum(bare) / num_sandboxes * 1e6,
        tracked_us=sum(times) / num_sandboxes * 1e6,
        slowest_ms=max(times) * 1e3,
        file_kib=size / 1024,
        dead_processes=num_processes,
        read_ms=timed_ms(ledger.pages),
        bill_ms=timed_ms(lambda: bill(ledger)),
        archive_ms=timed_ms(ledger.tidy),
        bill_after_ms=timed_ms(lambda: bill(ledger)),
    )


def write_dead(folder: Path, count: int) -> None:
    """Write files as processes of an earlier boot would have, a hundred sandboxes each."""
    head = Head("local", {}, "old", replace(this_process(), boot="earlier"))
    for number in range(count):
        lines = [head_line(head)]
        for one in range(100):
            name = f"swerl-{number}-{one:016x}"
            began_s = 1.7e9 + number * 3600
            entry = Entry(name, IMAGE, began_s, 60.0, opened_s=began_s, ended_s=began_s + 30)
            lines += entry_lines(entry)
        (folder / f"{number}.jsonl").write_text("".join(lines))


def timed_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sandboxes", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=200)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = asdict(measure(Path(folder), chosen.sandboxes, chosen.processes))
    for name, value in costs.items():
        print(f"{name:<16}{value:>12,.1f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(costs, indent=2) + "\n")
        print(f"written to {chosen.json}")


if __name__ == "__main__":
    main()
