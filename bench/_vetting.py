"""What vetting and grading cost beyond the tests themselves, on the local sandbox.

The tasks are written for this: a small repository with a bug, whose tests wait for some seconds, so
that the tests' own time is the same whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerl.checks._vet_runs import Runs
from swerl.checks.vet import Rigour, VetSettings, Vetted, vet
from swerl.core.sandbox import Exec, Limits
from swerl.core.task import GradingSpec, Task
from swerl.sandboxes import local

WORKERS = 2
TASKS = 4
TEST_S = 5.0
GRADINGS = 10
LIMITS = Limits(memory_mib=1024)
BUGGY = "def add(a, b):\n    return a - b\n"
GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TESTS = f"""\
import time
import unittest

import calc

time.sleep({TEST_S})


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_zero_stays_zero(self):
        self.assertEqual(calc.add(0, 0), 0)
"""


@dataclass(frozen=True, slots=True)
class Vetting:
    """What vetting came to."""

    tasks: int
    wall_s: float
    test_s: float
    """Seconds of all test commands."""
    share: float
    """Wall time over the least that it could be: the tests' time shared by all workers."""
    overhead_s: float
    """Median seconds of grading one patch, a sandbox's start included, beyond its tests."""


def measure(folder: Path) -> Vetting:
    """Vet some tasks, two at once, then grade one of them alone."""
    tasks = [_make_task(folder / str(n), n) for n in range(TASKS)]
    return asyncio.run(_measure(tasks))


async def _measure(tasks: Sequence[Task]) -> Vetting:
    backend = _Timed()
    heard: list[Vetted] = []
    settings = VetSettings("local", Rigour(), WORKERS, LIMITS)
    began = time.perf_counter()
    await vet(backend, tasks, settings, on_done=lambda each, _: heard.append(each))
    wall_s, test_s = time.perf_counter() - began, backend.test_s
    assert all(each.ok for each in heard), heard
    overheads = [await _overhead(tasks[0]) for _ in range(GRADINGS)]
    median = sorted(overheads)[GRADINGS // 2]
    return Vetting(len(tasks), wall_s, test_s, wall_s * WORKERS / test_s, median)


async def _overhead(task: Task) -> float:
    runs = Runs(local.build(local.Options()), LIMITS)
    began = time.perf_counter()
    run = await runs.grade(task, task.gold_patch)
    return time.perf_counter() - began - run.grade.test_s


class _Timed:
    """The local backend, which adds up how long test commands take."""

    def __init__(self) -> None:
        self.test_s = 0.0
        self._inner = local.build(local.Options())

    @asynccontextmanager
    async def open(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async with self._inner.open(*arguments, **options) as sandbox:
            plain = sandbox.run

            async def run(argv: Sequence[str], **rest: Any) -> Exec:
                done = await plain(argv, **rest)
                if list(argv[:3]) == ["bash", "-s", "--"]:
                    self.test_s += done.duration_s
                return done

            sandbox.run = run  # type: ignore[method-assign]
            yield sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _make_task(folder: Path, number: int) -> Task:
    folder.mkdir()
    (folder / "calc.py").write_text(BUGGY)
    environment: Mapping[str, str] = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    git = ("git", "-c", "user.name=b", "-c", "user.email=b@localhost")
    for argv in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *argv], cwd=folder, check=True, env=environment)
    test = "tests.test_calc.SumTest"
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=(f"test_add ({test}.test_add)",),
        pass_to_pass=(f"test_zero_stays_zero ({test}.test_zero_stays_zero)",),
        test_files={"tests/__init__.py": "", "tests/test_calc.py": TESTS},
        test_command="python3 -m unittest -v tests.test_calc",
        log_parser="django",
    )
    name = f"bench-calc-{number}"
    return Task(name, "bench/calc", f"dir:{folder}", "/repo", "Mend it.", spec, gold_patch=GOLD)
