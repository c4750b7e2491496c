"""The cost of grading: one run of the tests, and the blind runs that confirm a solved one.

    python bench/grading.py [--json FILE] [--test-s SECONDS] [--idle]

A small repository with four tests to fix, each of which computes for a while, is graded in `local`
sandboxes: with no blind run, and with five side by side or one after the other. CPU time is that
of all processes of the sandboxes. With `--idle` the tests wait instead: side by side they then take
the time that they take on a machine with a free core for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from swerl.core.contracts import OpenClean, Sandbox  # noqa: E402
from swerl.core.grade import Verdict  # noqa: E402
from swerl.core.sandbox import Limits  # noqa: E402
from swerl.core.task import Task  # noqa: E402
from swerl.grading.graders import swebench  # noqa: E402
from swerl.sandboxes import local  # noqa: E402
from tests.unit.checks.vetting import make_task  # noqa: E402

NUM_TESTS = 4
TESTS = """\
import time
import unittest

import calc

IDLE = {idle}


def work(seconds):
    if IDLE:
        return time.sleep(seconds)
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class SumTest(unittest.TestCase):
"""
TEST = """\
    def test_{name}(self):
        work({seconds})
        self.assertEqual(calc.add({one}, {two}), {total})

"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table."""

    way: str
    seconds: float
    cpu_s: float
    bits: float


def main() -> None:
    """Print the table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--test-s", type=float, default=4.0, help="time of all tests")
    parser.add_argument("--idle", action="store_true", help="tests that wait")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(Path(folder), args.test_s, is_idle=args.idle)
        found = asyncio.run(measure(task, at_once=8 if args.idle else os.cpu_count() or 1))
    base, kind = found[0], "waiting" if args.idle else "CPU time"
    print(f"{os.cpu_count()} cores, {NUM_TESTS} tests to fix, {args.test_s:g} s of {kind}")
    print(f"{'way':34} {'s':>7} {'ratio':>6} {'cpu s':>7} {'ratio':>6} {'bits':>6}")
    for each in found:
        ratio, cpu_ratio = each.seconds / base.seconds, each.cpu_s / base.cpu_s
        print(
            f"{each.way:34} {each.seconds:7.2f} {ratio:6.2f} {each.cpu_s:7.2f} {cpu_ratio:6.2f}"
            f" {each.bits:6.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def task_of(folder: Path, test_s: float, *, is_idle: bool) -> Task:
    """Return a Task whose tests compute or wait for so many seconds together."""
    rows = [(f"sum_{at}", 10 + at, 7 * at + 3) for at in range(NUM_TESTS)]
    text = TESTS.replace("{idle}", str(is_idle)) + "".join(
        TEST.format(name=name, one=one, two=two, total=one + two, seconds=test_s / NUM_TESTS)
        for name, one, two in rows
    )
    place = "tests.test_calc.SumTest"
    return make_task(
        folder / "image",
        fail_to_pass=tuple(f"test_{name} ({place}.test_{name})" for name, _, _ in rows),
        pass_to_pass=(),
        test_files={"tests/__init__.py": "", "tests/test_calc.py": text},
    )


async def measure(task: Task, *, at_once: int) -> list[Cost]:
    """Grade the known solution in each way; the effect of the swaps is measured before."""
    grader = swebench.build()
    swaps = (await grader.measure(task, opener(task, at_once=1), 2)).swaps
    spec = replace(task.grading, swaps=swaps, not_run=())
    ways = [
        ("no blind run", 0, 1),
        ("blind runs, side by side", 3, at_once),
        ("blind runs, one after the other", 3, 1),
    ]
    found = []
    for way, num_runs, at_once in ways:
        each = replace(task, grading=replace(spec, blind_runs=num_runs))
        started, cpu = time.monotonic(), _children_s()
        grade = await grader.grade(each, task.gold_patch, opener(each, at_once=at_once))
        assert grade.verdict is Verdict.SOLVED, grade.reason
        cost = Cost(way, time.monotonic() - started, _children_s() - cpu, grade.blind_bits)
        found.append(cost)
    return found


def opener(task: Task, *, at_once: int) -> OpenClean:
    """Return a function that opens clean sandboxes, so many at once."""
    backend, slots = local.build(local.Options()), asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def open_clean() -> AsyncIterator[Sandbox]:
        async with slots, backend.open(task.image, Limits(), workdir=task.workdir) as sandbox:
            yield sandbox

    return open_clean


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
