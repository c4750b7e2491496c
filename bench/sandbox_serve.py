"""What `swerl sandbox serve` costs its clients: the real `e2b` SDK against a server of its own.

    python bench/sandbox_serve.py [--backend NAME] [--template IMAGE] [--json FILE]

The server is the command itself, in a process of its own; the SDK runs in this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from e2b import AsyncSandbox, Sandbox

KEY = "e2b_" + "0" * 40
NUM_LIVES = 20
NUM_RUNS = 200
NUM_TOGETHER = 100
FILE_MIB = 100


@dataclass(frozen=True)
class Costs:
    """What was measured; times are medians unless the name says otherwise."""

    create_ms: float
    run_ms: float
    run_p90_ms: float
    kill_ms: float
    write_mib_per_s: float
    read_mib_per_s: float
    create_together_s: float
    """NUM_TOGETHER sandboxes created at once."""
    run_together_s: float
    """One command in each of them at once."""
    kib_per_finished_command: float
    """Memory that the server keeps for each command that has ended, until its sandbox goes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--template", default="host")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with serving(args.backend, args.template) as (options, pid):
        costs = measure(options, pid)
    for name, value in asdict(costs).items():
        print(f"{name:>26} {value:10.1f}")
    if args.json:
        args.json.write_text(json.dumps(asdict(costs), indent=2) + "\n")


@contextmanager
def serving(backend: str, image: str) -> Iterator[tuple[Mapping[str, str], int]]:
    """Start the command; yield what the SDK takes, and the server's pid."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text(KEY)
        argv = [sys.executable, "-m", "swerl.cli", "sandbox", "serve", "--listen", "127.0.0.1:0"]
        argv += ["--backend", backend, "--template", f"base={image}", "--api-key-file", str(key)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            url = server.stdout.readline().strip().partition("=")[2]
            try:
                yield {"api_url": url, "sandbox_url": url, "api_key": KEY}, server.pid
            finally:
                server.terminate()


def measure(options: Mapping[str, str], pid: int) -> Costs:
    """Return what a client pays."""
    Sandbox.create(**options).kill()
    lives = [_life(options) for _ in range(NUM_LIVES)]
    sandbox = Sandbox.create(**options)
    runs = [_seconds(lambda: sandbox.commands.run("true")) for _ in range(NUM_RUNS)]
    data = os.urandom(1 << 20) * FILE_MIB
    write_s = _seconds(lambda: sandbox.files.write("file", data))
    read_s = _seconds(lambda: sandbox.files.read("file", format="bytes"))
    before_kib = _memory_kib(pid)
    for _ in range(NUM_RUNS):
        sandbox.commands.run("true")
    kept_kib = (_memory_kib(pid) - before_kib) / NUM_RUNS
    sandbox.kill()
    create_s, run_s = asyncio.run(_together(options))
    return Costs(
        create_ms=statistics.median(create for create, _ in lives) * 1e3,
        run_ms=statistics.median(runs) * 1e3,
        run_p90_ms=statistics.quantiles(runs, n=10)[-1] * 1e3,
        kill_ms=statistics.median(kill for _, kill in lives) * 1e3,
        write_mib_per_s=FILE_MIB / write_s,
        read_mib_per_s=FILE_MIB / read_s,
        create_together_s=create_s,
        run_together_s=run_s,
        kib_per_finished_command=max(0.0, kept_kib),
    )


def _life(options: Mapping[str, str]) -> tuple[float, float]:
    started = time.perf_counter()
    sandbox = Sandbox.create(**options)
    created = time.perf_counter()
    sandbox.kill()
    return created - started, time.perf_counter() - created


async def _together(options: Mapping[str, str]) -> tuple[float, float]:
    started = time.perf_counter()
    boxes = await asyncio.gather(*(AsyncSandbox.create(**options) for _ in range(NUM_TOGETHER)))
    created = time.perf_counter()
    done = await asyncio.gather(*(box.commands.run("echo x") for box in boxes))
    ran = time.perf_counter()
    assert all(each.stdout == "x\n" for each in done)
    await asyncio.gather(*(box.kill() for box in boxes))
    return created - started, ran - created


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _memory_kib(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])


if __name__ == "__main__":
    main()
