"""Repositories of unusual shapes, and images that lack something, have their future hidden, too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import BrokenImageError, SandboxError
from swerl.core.sandbox import Exec
from swerl.core.task import Task
from swerl.tasks.hide_future import hide_future
from tests.unit.checks.leaks import (
    FIXED_LINE,
    LISTING,
    MAKE_FIX,
    SECRET_TEST,
    git,
    make_repository,
    opened,
    run,
    sh,
    task_of,
)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_repository(tmp_path / "image")


async def test_submodules_keep_their_commit_and_lose_their_history(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            """
            rm -rf /srv && mkdir /srv && git init -q /srv/lib && cd /srv/lib
            for n in 1 2 3; do echo $n >f; git add f; git commit -qm $n; done; cd /repo
            git -c protocol.file.allow=always submodule --quiet add /srv/lib lib
            git -C lib checkout -q HEAD~1; git add lib; git commit -qm sub; rm -rf /srv""",
        )
        own = task_of(Path("/nowhere"))
        before = await sh(sandbox, "git status --porcelain; git -C lib rev-parse HEAD")
        await hide_future(sandbox, own)
        assert await sh(sandbox, "git status --porcelain; git -C lib rev-parse HEAD") == before
        assert (await sh(sandbox, "git -C lib log --all --oneline | wc -l")).strip() == "1"


async def test_repositories_with_sha256_names_lose_their_future(tmp_path: Path) -> None:
    task = make_repository(tmp_path / "image", "--object-format=sha256")
    async with opened(task) as sandbox:
        await sh(sandbox, f"{MAKE_FIX} fetch_fix; git tag later $fix; rm -rf /tmp/fix")
        assert (await hide_future(sandbox, task)).base == task.base_commit
        assert FIXED_LINE not in await sh(sandbox, "git cat-file --batch-all-objects --batch")


async def test_a_partial_clone_fetches_nothing(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            """
            git -C /repo config uploadpack.allowFilter true; mkdir /srv
            git clone -q --filter=blob:none --no-local file:///repo /srv/part
            cd /srv/part; ls .git/objects/pack/*.promisor; cd /repo
            rm -rf .git; mv /srv/part/.git .git
            git config remote.origin.url 'ext::sh -c touch% /tmp/fetched'
            git config protocol.ext.allow always""",
        )
        done = await hide_future(sandbox, task)
        assert (done.base, done.history) == (task.base_commit, "none")
        assert (await run(sandbox, "test -e /tmp/fetched")).exit_code == 1
        assert "words of the image" in await sh(sandbox, "git --no-pager diff")


async def test_a_shallow_clone_stays_one(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            """mkdir /srv; git clone -q --depth 2 file:///repo /srv/part
            rm -rf .git; mv /srv/part/.git .git""",
        )
        done = await hide_future(sandbox, task)
        assert (done.base, done.history) == (task.base_commit, "full")
        assert len((await sh(sandbox, "git log --oneline")).splitlines()) == 2


async def test_a_workdir_inside_a_repository_loses_the_future_of_its_top(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(sandbox, f"{MAKE_FIX} fetch_fix; git tag later $fix; rm -rf /tmp/fix")
        inner = replace(task, workdir="/repo/pkg")
        await hide_future(sandbox, inner)
        assert (await sh(sandbox, "git tag")) == ""


@pytest.mark.parametrize(
    "damage",
    [
        "echo 1111111111111111111111111111111111111111 >.git/refs/heads/main",
        "echo nonsense >.git/HEAD",
        "echo '[core' >.git/config",
        "rm -rf .git/objects/*",
        "f=.git/objects/$(git rev-parse HEAD^{tree} | sed 's,..,&/,'); chmod u+w $f; : >$f",
        "rm -rf .git; echo 'gitdir: /nowhere' >.git",
    ],
)
async def test_a_broken_repository_is_a_broken_image(task: Task, damage: str) -> None:
    async with opened(task) as sandbox:
        await sh(sandbox, damage)
        with pytest.raises(BrokenImageError) as caught:
            await hide_future(sandbox, task)
        assert caught.value.hint
        assert not caught.value.retryable


async def test_a_repository_without_a_commit_loses_what_it_fetched(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            f"{MAKE_FIX} rm -rf .git; git init -q; git fetch -q /tmp/fix HEAD; rm -rf /tmp/fix",
        )
        assert (await hide_future(sandbox, task)).base == ""
        assert (await sh(sandbox, "git cat-file --batch-all-objects --batch-check")) == ""


async def test_a_workdir_without_a_repository_still_loses_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_total.py").write_text(SECRET_TEST)
    task = task_of(tmp_path)
    async with opened(task) as sandbox:
        done = await hide_future(sandbox, task)
        assert done.removed == (f"{task.workdir}/tests/test_total.py",)


async def test_without_a_repository_those_below_and_beside_lose_their_future(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            f"""{MAKE_FIX} mkdir -p /srv /repo/project; cp -r /tmp/fix/.git /repo/project/.git
            git clone -q --bare /tmp/fix /srv/total.git; rm -rf .git /tmp/fix
            cd project; git tag later; git reset -q --hard HEAD~1; git show later | grep -q start_of
            rm -rf .git/logs .git/ORIG_HEAD""",
        )
        done = await hide_future(sandbox, task)
        assert "/srv/total.git" in done.removed
        head = (await sh(sandbox, "git -C project rev-parse HEAD")).strip()
        assert head == task.base_commit
        held = await sh(sandbox, "git -C project cat-file --batch-all-objects --batch")
        assert "start_of" not in held


async def test_a_repository_inside_that_cannot_be_read_goes(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(sandbox, "mkdir -p vendor/.git; echo nonsense >vendor/.git/HEAD; echo 1 >vendor/f")
        done = await hide_future(sandbox, task)
        assert done.removed == ("/repo/vendor/.git",)
        assert await sh(sandbox, "cat vendor/f") == "1\n"


class OnBusybox:
    """A sandbox of an image that has busybox and git, and nothing else."""

    def __init__(self, real: Sandbox) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def run(self, argv: Sequence[str], **options: Any) -> Exec:
        return await self._real.run(argv, **{"env": {"PATH": "/tmp/busybox"}, **options})


@pytest.mark.skipif(not shutil.which("busybox"), reason="busybox is not installed")
async def test_an_image_with_little_more_than_git_is_enough(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            f"""{MAKE_FIX} fetch_fix; git tag later $fix; git remote add origin /x
            git worktree add -q /tmp/aside $fix; mkdir -p tests; echo x >tests/test_total.py
            rm -rf /tmp/fix; mkdir /tmp/busybox
            for each in $(busybox --list); do ln -s $(command -v busybox) /tmp/busybox/$each; done
            ln -s $(command -v git) /tmp/busybox/git""",
        )
        done = await hide_future(OnBusybox(sandbox), task)
        assert done.base == task.base_commit
        assert "start_of_summation" not in await sh(sandbox, LISTING)


async def test_a_full_disk_is_no_fault_of_the_image(tmp_path: Path) -> None:
    folder = tmp_path / "image"
    make_repository(folder)
    (folder / "data.bin").write_bytes(random.Random(1).randbytes(3 << 20))
    git(folder, "add", "data.bin")
    git(folder, "commit", "-qm", "Add data")
    git(folder, "tag", "later", git(folder, "commit-tree", "-m", "Mend", "HEAD^{tree}"))
    task = task_of(folder)
    async with opened(task, disk_mib=2) as sandbox:
        with pytest.raises(SandboxError, match="no space left"):
            await hide_future(sandbox, task)


AT_BASE = (
    "cp .wt/pkg/total.py /tmp/t.py; git -C .wt checkout -q {base}; cp /tmp/t.py .wt/pkg/total.py"
)
RELATIVE = "printf 'gitdir: ../.git/worktrees/.wt\\n' >.wt/.git"
LINKED = {
    "at the solution": "",
    "at the base, with the solution uncommitted": AT_BASE,
    "relative": RELATIVE,
    "relative, at the base": f"{AT_BASE}; {RELATIVE}",
    "its record is gone": "rm -rf .git/worktrees",
    "its pointer is gone": "rm .wt/.git",
}


@pytest.mark.parametrize("shape", LINKED)
async def test_a_linked_work_tree_inside_leaves_with_its_files(task: Task, shape: str) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            f"{MAKE_FIX} fetch_fix; rm -rf /tmp/fix; git worktree add -q .wt $fix\n"
            + LINKED[shape].format(base=task.base_commit),
        )
        await hide_future(sandbox, task)
        assert await sh(sandbox, "ls -d .wt || true") == ""
        assert FIXED_LINE not in await sh(sandbox, LISTING)


async def test_a_submodule_in_a_folder_of_the_name_stays(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            """
            rm -rf /srv && git init -q /srv/lib && git -C /srv/lib commit -qm 1 --allow-empty
            echo 1 >/srv/lib/f && git -C /srv/lib add f && git -C /srv/lib commit -qm 2
            git -c protocol.file.allow=always submodule --quiet add /srv/lib worktrees/lib
            git commit -qm sub; rm -rf /srv""",
        )
        await hide_future(sandbox, replace(task, base_commit=""))
        assert await sh(sandbox, "cat worktrees/lib/f") == "1\n"
