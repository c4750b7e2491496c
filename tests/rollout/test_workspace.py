"""The patch holds the agent's changes, in every state of the image's work tree."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Limits
from swerl.rollout import workspace
from swerl.sandboxes import local

WORKDIR = "/repo"


SCRIPT = """
git init -q --template= -b main; git config user.name a; git config user.email a@b
printf 'one\\n' >code.py; printf 'pin\\n' >setup.cfg; git add -A; git commit -qm base
printf 'pin changed by the image\\n' >setup.cfg
printf 'staged\\n' >staged.py; git add staged.py; printf 'left over\\n' >notes.txt
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A repository of one commit with a changed, a staged, and an untracked file."""
    subprocess.run(["sh", "-ec", SCRIPT], cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
async def sandbox(image: Path) -> AsyncIterator[Sandbox]:
    backend = local.build(local.Options())
    async with backend.open(f"dir:{image}", Limits(disk_mib=512), workdir=WORKDIR) as opened:
        yield opened


def applies(patch: str, folder: Path) -> bool:
    """Whether git would apply a patch to a folder."""
    apply = ["git", "apply", "--check", "-"]
    return subprocess.run(apply, cwd=folder, input=patch, text=True).returncode == 0


async def sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.run(["sh", "-ec", script], cwd=WORKDIR, timeout_s=30)
    assert done.exit_code == 0, done.text
    return done.stdout.decode()


async def test_a_patch_leaves_out_the_changes_of_the_image(sandbox: Sandbox) -> None:
    start = await workspace.start(sandbox, WORKDIR)
    await sh(sandbox, "echo two >>code.py; echo more >>notes.txt; echo new >new.py; rm staged.py")
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert "setup.cfg" not in patch
    changed = [line for line in patch.splitlines() if line.startswith("diff --git")]
    assert [line.split(" b/")[1] for line in changed] == [
        *("code.py", "new.py", "notes.txt", "staged.py"),
    ]


async def test_the_patch_applies_to_the_image_as_it_is(sandbox: Sandbox, image: Path) -> None:
    start = await workspace.start(sandbox, WORKDIR)
    await sh(sandbox, "echo two >>code.py; echo more >>setup.cfg; git add -A; git commit -qm work")
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert applies(patch, image)


@pytest.mark.parametrize(
    "setting",
    [
        *("diff.noprefix true", "diff.mnemonicPrefix true", "diff.relative true"),
        *("diff.context 0", "diff.orderFile /testbed/none", "color.ui always"),
        *("diff.external /bin/true", "diff.suppressBlankEmpty true", "core.hooksPath /nowhere"),
    ],
)
async def test_no_setting_of_the_agents_spoils_its_patch(
    sandbox: Sandbox, image: Path, setting: str
) -> None:
    start = await workspace.start(sandbox, WORKDIR)
    await sh(sandbox, f"git config --global {setting}; echo two >>code.py; echo new >new.py")
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert "+++ b/code.py" in patch
    assert applies(patch, image)


@pytest.mark.parametrize(
    "left",
    [
        "mkdir inner; git init -q inner; echo x >inner/f",
        ": >.git/index.lock",
        "echo nonsense >.git/index",
        ": >.git/index",
        "rm .git/index",
    ],
)
async def test_a_damaged_git_folder_costs_no_patch(
    sandbox: Sandbox, image: Path, left: str
) -> None:
    start = await workspace.start(sandbox, WORKDIR)
    await sh(sandbox, f"echo two >>code.py; echo new >new.py; {left}")
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert {"+two", "+new"} <= set(patch.splitlines())
    assert "setup.cfg" not in patch
    assert applies(patch, image)


async def test_a_replaced_base_changes_no_patch(sandbox: Sandbox) -> None:
    await sh(sandbox, "git add -A; git commit -qm all")
    start = await workspace.start(sandbox, WORKDIR)
    await sh(
        sandbox,
        f"echo two >>code.py; git commit -qam two; git tag -f mine; git replace {start.base} mine",
    )
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert "+two" in patch


async def test_untracked_files_that_git_does_not_show_are_the_images_too(sandbox: Sandbox) -> None:
    await sh(sandbox, "git commit -qam all; git config status.showUntrackedFiles no")
    assert await sh(sandbox, "git status --porcelain") == ""
    start = await workspace.start(sandbox, WORKDIR)
    assert await workspace.take_patch(sandbox, WORKDIR, start) == ""


async def test_no_change_is_an_empty_patch_and_the_index_stays(sandbox: Sandbox) -> None:
    before = await sh(sandbox, "git status --porcelain; sha256sum .git/index")
    start = await workspace.start(sandbox, WORKDIR)
    assert await sh(sandbox, "git status --porcelain; sha256sum .git/index") == before
    assert await workspace.take_patch(sandbox, WORKDIR, start) == ""


async def test_an_agent_that_collects_garbage_loses_nothing(sandbox: Sandbox) -> None:
    start = await workspace.start(sandbox, WORKDIR)
    await sh(sandbox, "echo two >>code.py; git gc -q --prune=now")
    assert (await sandbox.run(["git", "cat-file", "-e", start.base], cwd=WORKDIR)).exit_code != 0
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert "+two" in patch


async def test_a_large_untracked_folder_is_left_out(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir venv; head -c 20000000 /dev/urandom >venv/lib.bin")
    start = await workspace.start(sandbox, WORKDIR)
    assert start.skipped == ("venv/",)
    await sh(sandbox, "echo x >>venv/lib.bin; echo more >>notes.txt")
    patch = await workspace.take_patch(sandbox, WORKDIR, start)
    assert patch is not None
    assert "venv" not in patch
    assert "+more" in patch


async def test_a_clean_work_tree_starts_at_its_commit(sandbox: Sandbox) -> None:
    await sh(sandbox, "git add -A; git commit -qm all")
    start = await workspace.start(sandbox, WORKDIR)
    assert start.base == (await sh(sandbox, "git rev-parse HEAD")).strip()
    assert start.pack == b""
