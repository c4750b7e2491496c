"""A converted SWE-smith row is vetted on a stand-in image, and no sandbox holds the clean files."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks.vet import Rigour, VetSettings, Vetted, vet
from swerl.core.changes import Changes
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.grading.prepare import prepare
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.sandboxes import local
from swerl.tasks.datasets import find_converter
from tests.unit.checks.leaks import git

pytestmark = pytest.mark.integration

CLEAN = '''"""Sums."""


def clamp(value, low, high):
    """Return the value within its bounds."""
    lowest_allowed = max(value, low)
    return min(lowest_allowed, high)


def double(value):
    return value * 2
'''
BUG = """\
diff --git a/src/sums.py b/src/sums.py
--- a/src/sums.py
+++ b/src/sums.py
@@ -3,8 +3,7 @@

 def clamp(value, low, high):
     \"\"\"Return the value within its bounds.\"\"\"
-    lowest_allowed = max(value, low)
-    return min(lowest_allowed, high)
+    return min(value, high)


 def double(value):
"""
TESTS = """\
from src.sums import clamp, double


def test_clamp():
    assert clamp(-3, 0, 7) == 0
    assert clamp(11, 0, 7) == 7


def test_clamp_keeps():
    assert clamp(4, 0, 7) == 4


def test_double():
    assert double(4) == 8
"""
SEARCH = (
    "git cat-file --batch-all-objects --batch; git for-each-ref; git log --all -p; "
    "grep -rs lowest_allowed /repo /testbed /tmp /home || true"
)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    program = shutil.which("pytest", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no pytest stands beside this Python, for the stand-in image to run")
    for path, text in {"src/sums.py": CLEAN, "tests/test_sums.py": TESTS}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    git(tmp_path, "init", "-q", "--template=", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "whole")
    row = {
        "instance_id": "acme__sums.0123abcd.func__1",
        "repo": "swesmith/acme__sums.0123abcd",
        "image_name": f"dir:{tmp_path}",
        "patch": BUG,
        "problem_statement": "clamp ignores its lower bound.",
        "FAIL_TO_PASS": ["tests/test_sums.py::test_clamp"],
        "PASS_TO_PASS": [f"tests/test_sums.py::test_{name}" for name in ("clamp_keeps", "double")],
    }
    found = find_converter("swe-smith").to_task(row)  # type: ignore[arg-type]
    activate = f"conda() {{ export PATH={Path(program).parent}:$PATH PYTHONPATH=.; }}\n"
    return replace(found, files={"/opt/miniconda3/bin/activate": activate})


async def test_grading_brings_the_tests_and_nothing_else_of_the_clean_files(task: Task) -> None:
    pool = SandboxPool(local.build(local.Options()), Limits(disk_mib=256), concurrency=1)
    async with pool.for_grading(task) as prepared:
        sandbox = prepared.sandbox
        prepared = await prepare(task, Changes({}, {}), sandbox)
        assert prepared.failure is None, prepared.failure
        seen = await sandbox.run(["sh", "-c", SEARCH], cwd=task.workdir)
        assert "lowest_allowed" not in seen.text
        assert "refs/swerl" not in seen.text
        assert (await sandbox.read(f"{task.workdir}/tests/test_sums.py")).decode() == TESTS


async def test_a_row_can_be_solved_and_leaks_nothing(task: Task) -> None:
    found: list[Vetted] = []
    await vet(
        local.build(local.Options()),
        [task],
        VetSettings("local", Rigour(2)),
        on_done=lambda vetted, _: found.append(vetted),
    )
    [vetted] = found
    assert vetted.certificate, vetted.failure
    defects = {each.defect: each.detail for each in vetted.certificate.findings}
    assert not defects, defects
