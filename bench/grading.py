"""The cost of grading: one run of the tests, and the runs that confirm a solved patch.

    python bench/grading.py [--json FILE] [--test-s SECONDS] [--idle]

A small repository with four tests to fix, each of which computes for a while, is graded in `local`
sandboxes: once, and confirmed by four more runs side by side or one after the other. The last lines
give the mean cost of a patch at the default audit. With `--idle` the tests wait instead: side by
side they then take the time that they take on a machine with a free core for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
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
from swerl.core.grade import Confirmation, Verdict  # noqa: E402
from swerl.core.sandbox import Limits  # noqa: E402
from swerl.core.task import Task  # noqa: E402
from swerl.grading.audit import Audit  # noqa: E402
from swerl.grading.confirm import NUM_RUNS  # noqa: E402
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
    print(f"{'way':34} {'s':>7} {'ratio':>6}")
    for each in found:
        print(f"{each.way:34} {each.seconds:7.2f} {each.seconds / base.seconds:6.2f}")
    solved, flagged = 0.3, 0.03
    mean = mean_runs(solved, flagged)
    print(
        f"{mean:.2f} runs a patch at the default audit: {solved:.0%} solved, {flagged:.0%} flagged"
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
    """Grade the known solution in each way; its mutated tests are measured before."""
    grader = swebench.build()
    versions = (await grader.measure(task, opener(task, at_once=1))).versions
    task = replace(task, grading=replace(task.grading, mutated=versions, not_run=()))
    ways = [
        ("not confirmed", 0.0, 1),
        ("confirmed, side by side", 1.0, at_once),
        ("confirmed, one after the other", 1.0, 1),
    ]
    found = []
    for way, share, at_once in ways:
        started = time.monotonic()
        open_clean = opener(task, at_once=at_once)
        grade = await Audit(share).grade(grader, task, task.gold_patch, open_clean, text="")
        assert grade.verdict is Verdict.SOLVED, grade.reason
        assert (grade.confirmation is Confirmation.REAL) == (share == 1.0)
        found.append(Cost(way, time.monotonic() - started))
    return found


def mean_runs(solved: float, flagged: float, num: int = 20_000) -> float:
    """Return the mean runs of the tests for a patch at the default audit, in a long honest run."""
    audit, runs, rng = Audit(), 0, random.Random(1)
    for _ in range(num):
        runs += 1
        if rng.random() < solved and audit.is_due(rng.random() < flagged):
            runs += NUM_RUNS
            audit.num_real += 1
    return runs / num


def opener(task: Task, *, at_once: int) -> OpenClean:
    """Return a function that opens clean sandboxes, so many at once."""
    backend, slots = local.build(local.Options()), asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def open_clean() -> AsyncIterator[Sandbox]:
        async with slots, backend.open(task.image, Limits(), workdir=task.workdir) as sandbox:
            yield sandbox

    return open_clean


if __name__ == "__main__":
    main()
