"""Measure the cost of the ledger: a sandbox with and without it, and reading it back.

`python bench/ledger.py [--json FILE] [--sandboxes 20000] [--processes 200]`. One process opens
many sandboxes that take no time, one after the other; then the ledger also gets the sandboxes of
many dead processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from swerl.core.contracts import SandboxBackend
from swerl.core.liveness import this_process
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.sandboxes.ledger.bill import bill
from swerl.sandboxes.ledger.store import Entry, Ledger, Use
from swerl.sandboxes.ledger.tracked import Recorder, Tracked

T = TypeVar("T")
LIMITS = Limits()
IMAGE = "registry.example/swebench/sweb.eval.x86_64.some__repository-12345:latest"


@dataclass(frozen=True, slots=True)
class Costs:
    sandboxes: int
    bare_us: float
    """Microseconds of one sandbox without the ledger."""
    tracked_us: float
    loop_us: float
    """CPU time of the event loop's thread for one sandbox, in microseconds."""
    slowest_ms: float
    """The slowest sandbox: it waited for a checkpoint, or until the ended ones were added up."""
    longest_stall_ms: float
    """The longest time in which the event loop ran nothing else."""
    file_kib: float
    """Size of the database after all of them."""
    dead_processes: int
    read_ms: float
    """Reading everything, as `ps` does."""
    bill_ms: float
    tidy_ms: float
    """Adding up the sandboxes of dead processes, once."""
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
        await asyncio.sleep(0)
    return times


async def with_longest_stall(work: Awaitable[T]) -> tuple[T, float]:
    """Return the result of `work`, and by how many seconds a sleep of 1 ms was late at most."""
    late = [0.0]

    async def watch() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)

    watching = asyncio.ensure_future(watch())
    result = await work
    watching.cancel()
    return result, max(late)


def measure(folder: Path, num_sandboxes: int, num_processes: int) -> Costs:
    """Measure everything in an empty folder."""
    ledger = Ledger(folder)
    recorder = Recorder(ledger, "local", "{}", run="bench")
    tracked = Tracked(Backend(), recorder)  # type: ignore[arg-type]
    bare = asyncio.run(open_all(Backend(), num_sandboxes))  # type: ignore[arg-type]
    began_s = time.thread_time()
    times = asyncio.run(open_all(tracked, num_sandboxes))
    loop_s = time.thread_time() - began_s
    _, stall_s = asyncio.run(with_longest_stall(open_all(tracked, num_sandboxes)))
    recorder.close()
    size = ledger.path.stat().st_size
    write_dead(ledger, num_processes)
    return Costs(
        sandboxes=num_sandboxes,
        bare_us=sum(bare) / num_sandboxes * 1e6,
        tracked_us=sum(times) / num_sandboxes * 1e6,
        loop_us=loop_s / num_sandboxes * 1e6,
        slowest_ms=max(times) * 1e3,
        longest_stall_ms=stall_s * 1e3,
        file_kib=size / 1024,
        dead_processes=num_processes,
        read_ms=timed_ms(ledger.read),
        bill_ms=timed_ms(lambda: bill(ledger)),
        tidy_ms=timed_ms(ledger.tidy),
        bill_after_ms=timed_ms(lambda: bill(ledger)),
    )


def write_dead(ledger: Ledger, count: int) -> None:
    """Record sandboxes as processes of an earlier boot would have, a hundred each."""
    with closing(ledger.open()) as db:
        db.execute("BEGIN")
        for number in range(count):
            use = Use("local", "{}", "old", replace(this_process(), boot="earlier", pid=number))
            for one in range(100):
                name = f"swerl-{number}-{one:016x}"
                began_s = 1.7e9 + number * 3600
                ended_s = began_s + 30
                entry = Entry(use, name, IMAGE, began_s, 60.0, opened_s=began_s, ended_s=ended_s)
                ledger.add(db, entry)
        db.execute("COMMIT")


def timed_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
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
