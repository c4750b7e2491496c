"""Small tasks to vet, sound or broken in one way, and a backend that tells its runs apart."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxLostError
from swerl.core.sandbox import Limits, LiveSandbox
from swerl.core.task import GradingSpec, Task
from swerl.sandboxes import local

WORKDIR = "/repo"
RUN_FILE = "/tmp/run"
"""Holds the number of the sandbox among those that were opened, from 1 on."""
BROKEN = '"""Sums."""\n\nfrom __future__ import annotations\n\n\ndef add(a, b):\n    return a - b\n'
GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -6,2 +6,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TESTS = """\
import unittest

import calc


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_zero_stays_zero(self):
        self.assertEqual(calc.add(0, 0), 0)
"""
ADD = "test_add (tests.test_calc.SumTest.test_add)"
ZERO = "test_zero_stays_zero (tests.test_calc.SumTest.test_zero_stays_zero)"
_GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@localhost")


def make_task(folder: Path, name: str = "calc-sum-1", **spec: object) -> Task:
    """Write a repository that subtracts where it should add, and return its Task."""
    folder.mkdir(parents=True)
    (folder / "calc.py").write_text(BROKEN)
    for argv in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "base"]):
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
        subprocess.run([*_GIT, *argv], cwd=folder, check=True, env=environment)
    plain: dict[str, object] = {
        "grader": "swebench",
        "fail_to_pass": (ADD,),
        "pass_to_pass": (ZERO,),
        "test_files": {"tests/__init__.py": "", "tests/test_calc.py": TESTS},
        "test_command": "python3 -m unittest -v tests.test_calc",
        "log_parser": "django",
        "timeout_s": 600.0,
    }
    grading = GradingSpec(**{**plain, **spec})  # type: ignore[arg-type]
    return Task(name, "t/calc", f"dir:{folder}", WORKDIR, "Mend add.", grading, gold_patch=GOLD)


class Numbered:
    """The local backend, whose sandboxes can read which one they are: runs differ on purpose."""

    def __init__(self, *, lost: Sequence[int] = ()) -> None:
        self.num_opened = 0
        self._inner = local.build(local.Options())
        self._lost = lost

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **options: Any) -> AsyncIterator[Sandbox]:
        self.num_opened += 1
        number = self.num_opened
        if number in self._lost:
            raise SandboxLostError("the machine went away", hint="open a fresh sandbox")
        async with self._inner.open(image, limits, **options) as sandbox:
            await sandbox.write(RUN_FILE, str(number).encode())
            yield sandbox

    async def live(self) -> Sequence[LiveSandbox]:
        return await self._inner.live()

    async def remove(self, name: str) -> None:
        await self._inner.remove(name)

    def price(self, limits: Limits) -> float:
        return 0.0
