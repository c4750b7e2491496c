"""Code under test reads no more of the solution than an agent does, and honest tests still run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.changes import Changes, TreeFile
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.grading.prepare import prepare
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.sandboxes import local
from swerl.tasks.hide_future import Stage, hide_future
from tests.unit.checks.leaks import (
    BROKEN,
    FIXED,
    GOLD,
    SECRET_TEST,
    git,
    make_repository,
    opened,
    sh,
)

SEARCH = """
set +e
git --no-pager log --all -p; git --no-pager show $FIX; git stash list -p
for each in $(git fsck --lost-found --no-progress | cut -d ' ' -f 3); do git show $each; done
git cat-file --batch-all-objects --batch; cat .git/logs/HEAD
cat /aside/pkg/total.py /r2e_tests/* /home/fix.patch /expected_test_output.json
cat expected_test_output.json
grep -ra start_of_summation /repo /home /opt /srv /tmp
true
"""
ANSWERS = """
mkdir -p /r2e_tests /home
cp /tmp/fix/pkg/total.py /r2e_tests/test_1.py; cp /tmp/fix/pkg/total.py /home/fix.patch
cp /tmp/fix/pkg/total.py /expected_test_output.json
cp /tmp/fix/pkg/total.py expected_test_output.json
echo 'python3 -m pytest' >/home/run.sh
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository at the base of its task, with the fix on another branch and in a stash."""
    folder = tmp_path / "image"
    make_repository(folder)
    git(folder, "tag", "v1.0")
    git(folder, "checkout", "-q", "README.md")
    (folder / "pkg/total.py").write_text(FIXED)
    git(folder, "stash")
    git(folder, "checkout", "-q", "-b", "later")
    (folder / "pkg/total.py").write_text(FIXED)
    (folder / "tests").mkdir()
    (folder / "tests/test_total.py").write_text(SECRET_TEST)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Mend the summation")
    git(folder, "update-ref", "refs/swerl/clean", "HEAD")
    git(folder, "checkout", "-q", "main")
    return folder


def task_of(folder: Path, **spec: Any) -> Task:
    grading = GradingSpec("command", fail_to_pass=("test_total",), **spec)
    base = git(folder, "rev-parse", "main")
    return Task(
        "acme__total-4242", "acme/total", f"dir:{folder}", "/repo", "Mend.", grading, base, GOLD
    )


async def test_a_setup_takes_tests_from_the_fix_that_the_tests_cannot_read(folder: Path) -> None:
    fix = git(folder, "rev-parse", "later")
    task = task_of(
        folder,
        test_setup=f"git worktree add -q --detach /aside {fix}; git checkout -q {fix} -- tests",
        test_command="bash /home/run.sh",
    )
    async with opened(task) as sandbox:
        await sh(
            sandbox, f"git --no-pager show {fix} >/tmp/fix; rm /tmp/fix; mkdir -p /tmp/fix/pkg"
        )
        await sh(sandbox, f"git cat-file -p {fix}:pkg/total.py >/tmp/fix/pkg/total.py; {ANSWERS}")
        await sh(sandbox, "rm -r /tmp/fix")
        await hide_future(sandbox, task, stage=Stage.GRADING)
        prepared = await prepare(task, Changes({}, {}), sandbox)
        assert prepared.failure is None, prepared.failure
        seen = await sh(sandbox, SEARCH, env={"FIX": fix})
        assert "start_of_summation" not in seen
        assert await sh(sandbox, "cat tests/test_total.py") == SECRET_TEST
        assert await sh(sandbox, "cat pkg/total.py") == BROKEN
        assert await sh(sandbox, "cat /home/run.sh") == "python3 -m pytest\n"
        # A confirming run changes values in the tests; the index would still have the real ones.
        assert await sh(sandbox, "git ls-files -s -- tests") == ""
        stored = await sh(sandbox, "git cat-file --batch-all-objects --batch")
        assert SECRET_TEST not in stored and BROKEN in stored


async def test_a_grading_sandbox_has_no_future(folder: Path) -> None:
    task = task_of(folder, test_files={"tests/test_total.py": SECRET_TEST})
    pool = SandboxPool(local.build(local.Options()), Limits(disk_mib=256), concurrency=1)
    solved = Changes({"pkg/total.py": TreeFile(FIXED.encode())})
    for _ in range(2):
        async with pool.for_grading(task) as prepared:
            sandbox = prepared.sandbox
            prepared = await prepare(task, solved, sandbox)
            assert prepared.failure is None, prepared.failure
            seen = await sh(sandbox, "git stash list -p; git cat-file --batch-all-objects --batch")
            assert "start_of_summation" not in seen
            assert await sh(sandbox, "cat pkg/total.py") == FIXED
            # Projects ask git for their version and their files.
            assert (await sh(sandbox, "git describe --tags")).strip() == "v1.0"
            assert "pkg/total.py" in await sh(sandbox, "git ls-files")
            assert (await sh(sandbox, "git rev-parse HEAD")).strip() == task.base_commit


async def test_hidden_tests_stay_without_a_setup_but_with_a_report(folder: Path) -> None:
    task = task_of(
        folder,
        test_files={"tests/test_total.py": SECRET_TEST},
        files={"/tests/test.sh": "true"},
        report_path="/logs/verifier/reward.txt",
    )
    async with opened(task) as sandbox:
        await hide_future(sandbox, task, stage=Stage.GRADING)
        prepared = await prepare(task, Changes({}, {}), sandbox)
        assert prepared.failure is None, prepared.failure
        assert await sh(sandbox, "cat tests/test_total.py /tests/test.sh") == SECRET_TEST + "true"


async def test_files_that_grading_reads_stay(folder: Path) -> None:
    task = task_of(
        folder, test_command="bash /run_tests.sh && cat /tests/data", report_path="/reward"
    )
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            "mkdir /tests; touch /tests/data /run_tests.sh /reward /gold; ln -s . r2e_tests",
        )
        await hide_future(sandbox, task, stage=Stage.GRADING)
        left = await sh(sandbox, "ls -d /tests/data /run_tests.sh /reward /gold r2e_tests || true")
        assert left.split() == ["/reward", "/run_tests.sh", "/tests/data"]


async def test_what_vetting_found_goes_at_both_stages(folder: Path) -> None:
    plain = task_of(folder)
    task = replace(plain, certificate={"removed": ["/opt/answer.b64", "/repo/pkg/total.py"]})
    for stage in (Stage.AGENT, Stage.GRADING):
        async with opened(task) as sandbox:
            await sandbox.write("/opt/answer.b64", b"answer")
            done = await hide_future(sandbox, task, stage=stage)
            assert "/opt/answer.b64" in done.removed
            assert await sh(sandbox, "cat pkg/total.py") == BROKEN
