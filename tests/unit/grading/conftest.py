"""A small repository with one bug, and the Task that describes it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.contracts import OpenClean, Sandbox
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.sandboxes import local
from swerl.tasks.set_up import set_up

RUNNER = """
import calc
for name, wanted in {"test_add": 5, "test_zero": 0}.items():
    got = calc.add(2, 3) if name == "test_add" else calc.add(0, 0)
    print("PASSED" if got == wanted else "FAILED", name)
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A Task whose repository subtracts instead of adding."""
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repo / "test_calc.py").write_text("import calc\n\n\ndef test_zero():\n    pass\n")
    for argv in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run([*git, *argv], cwd=repo, check=True)
    spec = GradingSpec(
        grader="command",
        fail_to_pass=("test_add",),
        pass_to_pass=("test_zero",),
        test_files={"hidden/run.py": RUNNER},
        test_command="PYTHONPATH=. python3 hidden/run.py",
        log_parser="status_lines",
        timeout_s=20.0,
    )
    return Task("calc-1", "example/calc", "host", str(repo), "Fix add.", spec, gold_patch=GOLD)


@pytest.fixture
def with_spec(task: Task) -> Callable[..., Task]:
    """Build the Task with some fields of its grading spec changed."""

    def build(**changes: object) -> Task:
        return replace(task, grading=replace(task.grading, **changes))

    return build


def in_sandboxes(task: Task) -> OpenClean:
    """Return a function that opens local sandboxes of a Task."""
    backend = local.build(local.Options())

    @asynccontextmanager
    async def open_clean() -> AsyncIterator[Sandbox]:
        async with backend.open(task.image, Limits(), workdir=task.workdir) as sandbox:
            await set_up(sandbox, task)
            yield sandbox

    return open_clean


GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
