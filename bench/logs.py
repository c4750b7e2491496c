"""How long hostile test logs of 8 MiB take to read, and how long the event loop waits meanwhile.

    python bench/logs.py [--json FILE] [--mib N] [--parser NAME ...]

Each parser reads blank lines, one long line, and honest lines of its own runner again and again, by
the function that grading uses. A log past the limit of CPU time is not read: its Task is unsolved.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from swerl.grading.log_parsers import (  # noqa: E402
    PARSERS,
    LogError,
    find_parser,
    read_log,
)
from tests.unit.grading.test_hostile_logs import PYTEST, SAMPLES  # noqa: E402

TICK_S = 0.002


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the table."""

    parser: str
    log: str
    """Kind of the log that takes longest."""
    seconds: float
    cpu_s: float
    """CPU time of the child process, which other work on the machine does not change much."""
    lag_ms: float
    """Longest time for which nothing else ran on the event loop, of all logs."""
    num_tests: int
    """Tests that the log names; -1 if it is not read."""


def main() -> None:
    """Print the table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--mib", type=float, default=8.0)
    parser.add_argument("--parser", action="append", choices=sorted(PARSERS))
    args = parser.parse_args()
    found = [asyncio.run(measure(name, int(args.mib * 2**20))) for name in args.parser or PARSERS]
    print(f"{'parser':18} {'slowest log':12} {'s':>6} {'cpu s':>6} {'lag ms':>7} {'tests':>8}")
    for each in found:
        line = f"{each.parser:18} {each.log:12} {each.seconds:6.2f} {each.cpu_s:6.2f}"
        print(f"{line} {each.lag_ms:7.1f} {each.num_tests:8,}")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def logs(name: str, size: int) -> Mapping[str, str]:
    """Return hostile logs of this size for a parser, by kind."""
    lines = [line for line in SAMPLES.get(name, PYTEST).split("\n") if line.strip()]
    # A number in each round makes every name a new one.
    rounds = size // sum(len(line) + 8 for line in lines)
    own = "\n".join(f"{line} {number}" for number in range(rounds) for line in lines)
    return {"blank lines": "\n" * size, "one line": lines[0] + " x" * (size // 2), "own lines": own}


async def measure(name: str, size: int) -> Figures:
    """Read each log once and return the figures of the slowest."""
    slowest, lag = ("", 0.0, -1.0, 0), [0.0]
    watch = asyncio.create_task(watch_loop(lag))
    for kind, log in logs(name, size).items():
        await asyncio.sleep(0)
        started, used = time.monotonic(), children_cpu_s()
        try:
            num_tests = len(await read_log(find_parser(name), log))
        except LogError:
            num_tests = -1
        seconds = time.monotonic() - started
        cpu_s = children_cpu_s() - used
        if cpu_s > slowest[2]:
            slowest = kind, seconds, cpu_s, num_tests
    watch.cancel()
    kind, seconds, cpu_s, num_tests = slowest
    return Figures(name, kind, seconds, cpu_s, lag[0] * 1000, num_tests)


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def watch_loop(lag: list[float]) -> None:
    """Keep the longest delay of a short sleep in `lag`."""
    while True:
        started = time.monotonic()
        await asyncio.sleep(TICK_S)
        lag[0] = max(lag[0], time.monotonic() - started - TICK_S)


if __name__ == "__main__":
    main()
