"""A Task's set-up exists in both sandboxes; hidden grading data does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swerl.core.errors import BrokenImageError
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.sandboxes import local
from swerl.tasks.datasets import find_converter
from tests.unit import made

SCRIPT = """
git init -q --template= -b main; git config user.name a; git config user.email a@b
mkdir src tests; echo 'return a + b' >src/sums.py; echo 'assert hidden' >tests/test_sums.py
git add -A; git commit -qm whole
"""
BUG = """diff --git a/src/sums.py b/src/sums.py
--- a/src/sums.py
+++ b/src/sums.py
@@ -1 +1 @@
-return a + b
+return a - b
"""


@pytest.fixture
def image(tmp_path: Path) -> str:
    subprocess.run(["sh", "-ec", SCRIPT], cwd=tmp_path, check=True)
    return f"dir:{tmp_path}"


@pytest.fixture
def pool() -> SandboxPool:
    return SandboxPool(local.build(local.Options()), Limits(disk_mib=256), concurrency=2)


def smith_task(image: str) -> Task:
    row = {
        "instance_id": "acme__sums.0123abcd.func__1",
        "repo": "swesmith/acme__sums.0123abcd",
        "image_name": image,
        "patch": BUG,
        "problem_statement": "Sums are wrong.",
        "FAIL_TO_PASS": ["tests/test_sums.py::test_add"],
        "PASS_TO_PASS": [],
    }
    return find_converter("swe-smith").to_task(row)  # type: ignore[arg-type]


async def test_grading_gets_the_hidden_tests_back(image: str, pool: SandboxPool) -> None:
    task = smith_task(image)
    async with pool.for_grading(task) as prepared:
        sandbox = prepared.sandbox
        script = f"git apply -\n{task.grading.test_setup}\ncat src/* tests/*"
        patch = task.gold_patch.encode()
        told = await sandbox.run(["sh", "-ec", script], cwd=task.workdir, stdin=patch)
        assert told.exit_code == 0, told.text
        assert told.text == "return a + b\nassert hidden\n"


async def test_a_setup_that_fails_is_the_images_fault(image: str, pool: SandboxPool) -> None:
    task = made.task("a", image, "/repo", setup="git checkout no")
    with pytest.raises(BrokenImageError, match=r"setup of task a failed .*no"):
        async with pool.for_grading(task):
            pass
