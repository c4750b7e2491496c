"""Hide the future in real containers, on repositories of root and of the ordinary user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks.scan_leaks import scan
from swerl.core.sandbox import Limits
from swerl.sandboxes import docker
from swerl.tasks.hide_future import hide_future
from tests.unit.checks.leaks import task_of

PLANT = """
mkdir -p "$1"; cd "$1"; export HOME=/tmp
git init -q -b main .; git config user.name a; git config user.email a@b
echo broken >code.py; git add -A; git commit -qm base; git tag v1
git checkout -q -b later; echo mended >code.py; git commit -qam fix; git checkout -q main
"""
READ = """
git -c safe.directory='*' log --all --oneline
git -c safe.directory='*' cat-file --batch-all-objects --batch
git -c safe.directory='*' status --porcelain
stat -c '%U' .git/HEAD .git/objects .git/config code.py
"""


@pytest.mark.parametrize("owner", ["root", None])
async def test_the_future_is_hidden_and_the_owner_of_the_repository_stays(
    dockerd: str, docker_image: str, owner: str | None
) -> None:
    backend = docker.build(docker.Options(base_url=dockerd))
    task = task_of(Path("/nowhere"))
    async with backend.open(docker_image, Limits(), workdir=task.workdir) as sandbox:
        made = await sandbox.run(["mkdir", "/r2e_tests"], user="root", cwd="/")
        assert made.exit_code == 0, made.text
        workdir = "/repo" if owner is None else "/opt/repo"
        task = replace(task, workdir=workdir)
        planted = await sandbox.run(["sh", "-ec", PLANT, "sh", workdir], user=owner, cwd="/")
        assert planted.exit_code == 0, planted.text
        done = await hide_future(sandbox, task)
        assert "/r2e_tests" in done.removed
        told = await sandbox.run(["sh", "-c", READ], cwd=task.workdir)
        assert "base" in told.text
        assert "mended" not in told.text
        owners = set(told.text.split("\n")[-5:-1])
        assert len(owners) == 1
        assert (await scan(sandbox, task)).leaks == ()
