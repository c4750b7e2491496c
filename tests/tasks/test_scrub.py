"""What an agent can no longer read after a scrub, and what stays exactly as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.errors import BrokenImageError
from swerl.task import Task
from swerl.tasks.scrub import History, scrub
from swerl.tasks.sweep import sweep

from .leaks import (
    FIXED,
    FIXED_LINE,
    MAKE_FIX,
    PLANTED,
    SECRET_TEST,
    git,
    make_repository,
    opened,
    run,
    sh,
)

STATE = """
git rev-parse HEAD
git --no-pager diff --no-ext-diff --no-textconv
git status --porcelain
git --no-pager blame --no-progress -l pkg/total.py
git --no-pager log --format=%H%d%s
"""
FILES = """
find . -path ./.git -prune -o -type f -exec stat -c '%a %n' {} + -exec sha256sum {} + | sort
sha256sum <"$(git rev-parse --git-path index)"
"""
UNTRACKED_LEAKS = {"bundle in the work tree", "repository of another tool", "rejected hunk",
                   "original file", "hidden test", "compiled hidden test", "dataset's result"}  # fmt: skip


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_repository(tmp_path / "image")


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_leak_is_found_and_gone_after_the_scrub(task: Task, name: str) -> None:
    planted = PLANTED[name]
    async with opened(task) as sandbox:
        before = await sh(sandbox, STATE)
        await sh(sandbox, f"{MAKE_FIX}\n{planted.script}")
        if name not in {"borrowed objects"}:
            await sh(sandbox, "rm -rf /tmp/fix /tmp/r /tmp/p-*")
        files = await sh(sandbox, FILES)
        raw = await sweep(sandbox, task)
        found = [
            leak for leak in raw.leaks if leak.kind is planted.kind and planted.name in leak.name
        ]
        assert found, raw.leaks
        done = await scrub(sandbox, task)
        assert done.changed
        assert done.base == task.base_commit
        left = await sweep(sandbox, task)
        assert left.leaks == ()
        assert await sh(sandbox, STATE) == before
        if name not in UNTRACKED_LEAKS:
            assert await sh(sandbox, FILES) == files
