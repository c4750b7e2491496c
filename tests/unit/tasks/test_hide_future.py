"""An agent cannot read the future, and everything else stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.task import Task
from swerl.tasks import hide_future as hiding
from swerl.tasks.hide_future import hide_future
from tests.unit.checks.leaks import (
    FIXED,
    FIXED_LINE,
    LEAKS,
    LISTING,
    MAKE_FIX,
    git,
    make_repository,
    opened,
    run,
    sh,
    task_of,
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
"""
BESIDE_HISTORY = {
    "bundle in the work tree",
    "repository of another tool",
    "rejected hunk",
    "original file",
    "hidden test",
    "compiled hidden test",
    "compiled solution",
    "compiled file that the solution adds",
    "types of the solution",
    "dataset's result",
}
"""Leaks in the work tree."""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_repository(tmp_path / "image")


@pytest.mark.integration
@pytest.mark.parametrize("name", LEAKS)
async def test_a_leak_is_hidden_and_the_rest_stays(task: Task, name: str) -> None:
    word, script = LEAKS[name]
    async with opened(task) as sandbox:
        before, files = await sh(sandbox, STATE), await sh(sandbox, FILES)
        await sh(sandbox, f"{MAKE_FIX}\n{script}")
        if name != "borrowed objects":
            await sh(sandbox, "rm -rf /tmp/fix /tmp/r /tmp/p-*")
        assert word in await sh(sandbox, LISTING)
        done = await hide_future(sandbox, task)
        assert done.base == task.base_commit
        listing = await sh(sandbox, LISTING)
        assert "start_of_summation" not in listing
        assert not word or word not in listing
        assert await sh(sandbox, STATE) == before
        if name not in BESIDE_HISTORY:
            assert await sh(sandbox, FILES) == files


@pytest.mark.parametrize(
    "attempt",
    [
        "git --no-pager log --all -p",
        "git --no-pager show $FIX",
        "git --no-pager log --all -p -S start_of_summation",
        "git tag -d v2.0; git update-ref -d refs/remotes/origin/main; rm -rf .git/logs;"
        "for each in $(git fsck --lost-found --no-progress); do git --no-pager show $each; done",
        "git cat-file --batch-all-objects --batch",
        "git --no-pager reflog show --all -p; cat .git/logs/HEAD || true",
        "git cherry-pick -n $FIX; git --no-pager diff HEAD",
        "git checkout -q v2.0; git checkout -q origin/main; cat pkg/total.py",
        "git fetch -q origin; git --no-pager show FETCH_HEAD; git stash apply",
        "for p in .git/objects/pack/*; do git unpack-objects -r <$p; done; grep -ra start_of .",
    ],
)
async def test_an_agent_cannot_read_the_fix(task: Task, attempt: str) -> None:
    async with opened(task) as sandbox:
        fix = await sh(
            sandbox,
            f"""{MAKE_FIX}
            git remote add origin /tmp/fix; fetch_fix
            git tag v2.0 $fix; git update-ref refs/remotes/origin/main $fix
            git update-ref --create-reflog HEAD $fix; git update-ref HEAD $fix~1
            echo $fix""",
        )
        env = {"FIX": fix.strip()}
        told = await run(sandbox, f"set +e; {attempt}", env=env)
        assert "start_of_summation" in told.text or "fetch" in attempt or "unpack" in attempt
        await sh(sandbox, "git checkout -qf main; rm -rf .git/lost-found .git/index.lock")
        await hide_future(sandbox, task)
        await sh(sandbox, "rm -rf /tmp/fix")
        told = await run(sandbox, f"set +e; {attempt}", env=env)
        assert "start_of_summation" not in told.text


@pytest.mark.parametrize(("limit", "commits"), [(50_000, 3), (2, 1)])
async def test_a_large_past_is_cut(
    task: Task, monkeypatch: pytest.MonkeyPatch, limit: int, commits: int
) -> None:
    monkeypatch.setattr(hiding, "MAX_OBJECTS", limit)
    async with opened(task) as sandbox:
        await sh(sandbox, f"{MAKE_FIX} fetch_fix; git branch later $fix; rm -rf /tmp/fix")
        for history in ("full" if commits == 3 else "none", "full"):  # a cut past has no parents
            done = await hide_future(sandbox, task)
            assert done.history == history
            assert len((await sh(sandbox, "git log --oneline --all")).splitlines()) == commits
            assert (await sh(sandbox, "git rev-parse HEAD")).strip() == task.base_commit
            assert "words of the image" in await sh(sandbox, "git --no-pager diff")
            assert len((await sh(sandbox, "git --no-pager blame pkg/total.py")).splitlines()) == 5
            assert not (await sh(sandbox, "git fsck --no-progress --full 2>&1")).strip()


async def test_a_past_that_holds_the_solution_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "image"
    make_repository(folder)
    git(folder, "checkout", "-q", "README.md")
    for text in (FIXED, (folder / "pkg/total.py").read_text()):
        (folder / "pkg/total.py").write_text(text)
        git(folder, "commit", "-qam", "Try and revert")
    task = task_of(folder)
    async with opened(task) as sandbox:
        done = await hide_future(sandbox, task)
        assert done.history == "none"
        assert done.base == git(folder, "rev-parse", "HEAD")
        assert FIXED_LINE not in await sh(sandbox, "git cat-file --batch-all-objects --batch")


async def test_commits_on_top_of_the_base_become_changes_of_the_work_tree(task: Task) -> None:
    folder = Path(task.image.removeprefix("dir:"))
    git(folder, "commit", "-qam", "Set the image up")
    async with opened(task) as sandbox:
        done = await hide_future(sandbox, task)
        assert done.base == task.base_commit
        assert (await sh(sandbox, "git rev-parse HEAD")).strip() == task.base_commit
        assert "words of the image" in await sh(sandbox, "git --no-pager diff")
        assert await sh(sandbox, "git --no-pager diff --cached") == ""
        assert "set the image up" not in (await sh(sandbox, "git log --all")).lower()


async def test_a_base_commit_that_the_image_lacks_gives_way_to_its_head(task: Task) -> None:
    stranger = task_of(Path(task.image.removeprefix("dir:")), base_commit="1" * 40)
    async with opened(stranger) as sandbox:
        assert (await hide_future(sandbox, stranger)).base == task.base_commit


async def test_no_setting_of_the_image_runs_a_program(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            f"""{MAKE_FIX} fetch_fix; git branch later $fix
            cat >/tmp/ran.sh <<'END'
            #!/bin/sh
            touch /tmp/ran
            cat
END
            chmod +x /tmp/ran.sh; mkdir -p .git/hooks
            for hook in post-checkout reference-transaction pre-auto-gc fsmonitor-watchman
            do cp /tmp/ran.sh .git/hooks/$hook; done
            for key in core.fsmonitor core.pager core.editor core.sshCommand core.askPass \
              diff.external diff.all.textconv filter.all.clean filter.all.smudge \
              filter.all.process gpg.program credential.helper core.alternateRefsCommand
            do git config $key /tmp/ran.sh; git config -f /root/.gitconfig $key /tmp/ran.sh
            git config -f /home/agent/.gitconfig $key /tmp/ran.sh; done
            git config core.hooksPath .git/hooks; git config filter.all.required true
            echo '* diff=all filter=all' >.git/info/attributes 2>/dev/null ||
              {{ mkdir .git/info; echo '* diff=all filter=all' >.git/info/attributes; }}
            mkdir tests; echo x >tests/test_total.py
            rm -f /tmp/ran""",
        )
        await hide_future(sandbox, task)
        assert (await run(sandbox, "test -e /tmp/ran")).exit_code == 1
        await sh(sandbox, "git status; git --no-pager diff; git --no-pager log -p")
        assert (await run(sandbox, "test -e /tmp/ran")).exit_code == 1


async def test_compiled_files_of_their_sources_stay(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            """mkdir pkg/__pycache__; cd pkg/__pycache__; echo x >total.cpython-311.pyc
            echo x >committed.cpython-311.pyc; git add -f committed.cpython-311.pyc
            git commit -qm 'Commit a compiled file'""",
        )
        await hide_future(sandbox, replace(task, base_commit=""))
        assert await sh(sandbox, "ls pkg/__pycache__ | wc -l") == "2\n"


async def test_a_test_of_the_base_stands_as_the_base_has_it(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            """mkdir tests; echo old >tests/test_total.py; git add tests; git commit -qm tests
            echo hidden >tests/test_total.py""",
        )
        await hide_future(sandbox, task_of(Path("/nowhere")))
        assert await sh(sandbox, "cat tests/test_total.py") == "old\n"
        assert "words of the image" in await sh(sandbox, "cat README.md")


async def test_tags_of_the_past_stay_so_that_a_project_knows_its_version(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(
            sandbox,
            f"""{MAKE_FIX} fetch_fix
            git tag v1.0 HEAD~2; git tag -a -m 'the fix is to filter' v1.1 HEAD~1; git tag v2.0 $fix
            git pack-refs --all; git tag v1.2 HEAD~1; rm -rf /tmp/fix""",
        )
        await hide_future(sandbox, task)
        assert (await sh(sandbox, "git tag")).split() == ["v1.0", "v1.1", "v1.2"]
        assert (await sh(sandbox, "git describe --tags --match 'v1.[01]'")).startswith("v1.1-1-g")
        everything = await sh(sandbox, "git cat-file --batch-all-objects --batch")
        assert "filter" not in everything
        assert not (await sh(sandbox, "git fsck --no-progress --full 2>&1")).strip()


async def test_a_file_of_the_base_stays_where_datasets_leave_one_of_that_name(task: Task) -> None:
    folder = Path(task.image.removeprefix("dir:"))
    (folder / "parser.py").write_text("the project's own\n")
    git(folder, "add", "parser.py")
    git(folder, "commit", "-qm", "Add a parser")
    (folder / "output.json").write_text("{}")
    own = replace(task_of(folder), workdir="/workspace")
    async with opened(own) as sandbox:
        done = await hide_future(sandbox, own)
        assert done.removed == ("/workspace/output.json",)
        assert await sandbox.read("/workspace/parser.py") == b"the project's own\n"
