"""A prepared sandbox is kept once, and opened again with the same content byte for byte."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.changes import Changes, FileKind, TreeFile
from swerl.core.contracts import Sandbox
from swerl.core.errors import BrokenImageError, SandboxError
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.harnesses import builtin
from swerl.images.store import Store
from swerl.rollout.sandbox_pool import PreparedSandbox, SandboxPool
from swerl.sandboxes import local
from swerl.tasks import worktree
from swerl.tasks.datasets import find_converter
from tests.unit import made
from tests.unit.sandboxes.helpers import write_image

TASK_IMAGE = "built:prepared"
HARNESS = builtin.build(builtin.Options())
LIMITS = Limits(disk_mib=256)
REPOSITORY = """
git init -q --template= -b main; git config user.name a; git config user.email a@b
mkdir -p pkg docs/old; echo broken >pkg/code.py; echo text >docs/old/a; ln -s pkg/code.py link
mkdir tests; echo 'assert hidden' >tests/test_a.py
printf '#!/bin/sh\\n' >run.sh; chmod 755 run.sh; git add -A; git commit -qm base; git tag v1
git checkout -q -b later; echo mended >pkg/code.py; git commit -qam fix; git checkout -q main
mkdir r2e_tests; echo hidden >r2e_tests/test_1.py; mkdir empty; touch -d 2001-02-03 docs/old/a
"""
TREE = """
find . -path ./.git/index -prune -o ! -type d -printf '%y %m %s %T@ %u %p -> %l\\n' | sort
find . -type d -printf '%m %u %p\\n' | sort
find . -path ./.git/index -prune -o -type f -exec sha256sum {} + | sort
git status --porcelain=v2 --branch; git log --all --format='%H %D %s'; git fsck --full 2>&1
git ls-files --stage; git diff-files; git count-objects -v; git config --list --show-origin
git describe --tags; ls -A /home /home/agent / /tmp
"""
"""Print everything that an agent can see of a repository; the index holds the file system's own
numbers, so its content is printed by git."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["sh", "-ec", REPOSITORY], cwd=folder, check=True)
    return folder


class Counting:
    """A backend that counts the openings of each image."""

    def __init__(self) -> None:
        self.inner = local.build(local.Options())
        self.opened: list[str] = []

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **options: Any) -> AsyncIterator[Any]:
        self.opened.append(image.partition(":")[0])
        async with self.inner.open(image, limits, **options) as sandbox:
            yield sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def identify(self, image: str) -> str:
        return await self.inner.identify(image)

    async def find_snapshot(self, name: str) -> str:
        return await self.inner.find_snapshot(name)

    async def drop_snapshot(self, name: str) -> None:
        await self.inner.drop_snapshot(name)


class WithoutSnapshots:
    """A backend that can take no snapshots, as most cannot."""

    def __init__(self) -> None:
        self.open = local.build(local.Options()).open


async def refuse(name: str = "") -> str:
    raise SandboxError("the disk is full", hint="free some space")


def make(backend: Any) -> SandboxPool:
    return SandboxPool(backend, LIMITS, concurrency=4)


def for_agent(pool: SandboxPool, task: Task) -> AbstractAsyncContextManager[PreparedSandbox]:
    return pool.for_agent(task, HARNESS)


def task_of(image: str, **fields: Any) -> Task:
    return made.task("a__b-1", image, "/repo", **fields)


async def shown(sandbox: Sandbox) -> str:
    return (await sandbox.run(["sh", "-c", TREE], cwd="/repo")).text


def built(repository: Path) -> str:
    """Return a `built:` image whose root, and not only the workdir, is an overlay."""
    layer = repository.parent / "tree"  # the name of the store's layers and of a snapshot
    shutil.copytree(repository, layer / "repo", symlinks=True)
    (layer / "root").mkdir()
    (layer / "root/expected_test_output.json").write_text("{}")
    (layer / "expected_test_output.json").write_text("{}")
    write_image(TASK_IMAGE.removeprefix("built:"), [layer])
    return TASK_IMAGE


SETUP = "echo set >pkg/new.py; git add pkg/new.py; rm -r docs; mkdir docs; echo n >docs/b"


@pytest.mark.parametrize("kind", ["dir", "built", "setup"])
@pytest.mark.parametrize("stage", ["agent", "grading"])
async def test_the_view_is_the_same_byte_for_byte(repository: Path, kind: str, stage: str) -> None:
    image = f"dir:{repository}" if kind == "dir" else built(repository)
    task = task_of(image, setup=SETUP if kind == "setup" else "", files={"/repo/given": "text"})
    views = []
    counting = Counting()
    pools = [make(WithoutSnapshots()), make(counting)]
    for pool in (pools[0], pools[1], pools[1], make(counting)):
        opened = for_agent(pool, task) if stage == "agent" else pool.for_grading(task)
        async with opened as prepared:
            views.append(await shown(prepared.sandbox))
    assert counting.opened == [kind.replace("setup", "built"), "snapshot", "snapshot"]
    assert "base" in views[0] and "fatal" not in views[0]
    for view in views[1:]:
        assert timeless(view) == timeless(views[0])
    # The times of files that the image has are equal, too.
    times = [[line for line in view.splitlines() if " ./docs/old/a " in line] for view in views]
    assert times[0] == times[1] == times[2] == times[3]


async def test_a_snapshot_that_goes_before_it_is_opened_is_prepared_anew(
    repository: Path,
) -> None:
    class Forgetful(Counting):
        async def find_snapshot(self, name: str) -> str:
            found = await super().find_snapshot(name)
            await self.drop_snapshot(name)
            return found

    machine = Forgetful()
    views, pool = [], make(machine)
    for _ in range(3):
        task = task_of(f"dir:{repository}", files={"/repo/a": "text"})
        async with for_agent(pool, task) as prepared:
            views.append(timeless(await shown(prepared.sandbox)))
    assert machine.opened == ["dir", "snapshot", "dir", "dir"]
    assert views[0] == views[1] == views[2]


def timeless(view: str) -> list[str]:
    """Return a view without the times of files that the preparation itself has written."""
    year = f"{int(time.time()) // 10**6}"
    return [
        " ".join(word for word in line.split(" ") if not word.startswith(year))
        for line in view.splitlines()
    ]


async def test_concurrent_attempts_and_grading_share_one_preparation(repository: Path) -> None:
    shutil.rmtree(repository / "r2e_tests")  # an agent may not see it, but grading may
    backend, task = Counting(), task_of(f"dir:{repository}")
    pool = make(backend)

    async def attempt() -> str:
        async with for_agent(pool, task) as prepared:
            return await shown(prepared.sandbox)

    views = await asyncio.gather(*(attempt() for _ in range(4)))
    for grading in (pool, make(WithoutSnapshots())):
        async with grading.for_grading(task) as prepared:
            views.append(await shown(prepared.sandbox))
    assert len({"\n".join(timeless(view)) for view in views}) == 1
    assert sorted(backend.opened) == ["dir", *["snapshot"] * 4]


async def test_a_changed_image_or_task_is_prepared_anew(repository: Path) -> None:
    backend, task = Counting(), task_of(f"dir:{repository}")
    pool = make(backend)
    async with for_agent(pool, task):
        pass
    (repository / "pkg/code.py").write_text("edited\n")
    async with for_agent(pool, task) as prepared:
        assert await prepared.sandbox.read("/repo/pkg/code.py") == b"edited\n"
    async with for_agent(pool, replace(task, files={"/repo/more": "x"})) as prepared:
        assert await prepared.sandbox.read("/repo/more") == b"x"
    assert backend.opened == ["dir"] * 3


@pytest.mark.parametrize("fields", [{"setup": "sleep 60 &"}, {"files": {"/tmp/given": "x"}}])
async def test_what_a_snapshot_would_lose_is_prepared_each_time(
    repository: Path, fields: dict[str, Any]
) -> None:
    backend, task = Counting(), task_of(built(repository), **fields)
    pool = make(backend)
    for _ in range(2):
        async with for_agent(pool, task) as prepared:
            if "files" in fields:
                assert await prepared.sandbox.read("/tmp/given") == b"x"
    assert "snapshot" not in backend.opened


BUILD = """
import asyncio, sys
from tests.unit.rollout.test_sandbox_pool import *
async def main():
    print("begins", flush=True)
    async with for_agent(make(Counting()), task_of(sys.argv[1])):
        pass
asyncio.run(main())
"""


@pytest.mark.integration
def test_a_build_killed_at_any_moment_leaves_nothing_that_is_served(
    repository: Path, cache: Path
) -> None:
    for name in range(200):
        (repository / f"r2e_tests/big{name}").write_bytes(os.urandom(1000))
    for number in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", BUILD, f"dir:{repository}"], stdout=subprocess.PIPE
        )
        assert process.stdout and process.stdout.readline() == b"begins\n"
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.04 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = Store(cache / "store")
        for layer_id, found in store.snapshots().items():
            # Only a finished build is found, and it is whole.
            assert store.has_layer(layer_id)
            assert found.base == f"dir:{repository}"
        store.remove_leftovers()
        assert not list((cache / "store/work").glob("*"))


@pytest.mark.parametrize("installs", [False, True])
async def test_one_list_of_the_work_tree_serves_all_attempts(
    repository: Path, installs: bool
) -> None:
    task = task_of(f"dir:{repository}")
    pool = make(Counting())
    lists = []
    for _ in range(3):
        async with for_agent(pool, task) as prepared:
            sandbox = prepared.sandbox
            if installs:
                await sandbox.write("/repo/config", b"of the agent program\n")
            start = await prepared.list_start(kept=())
            await sandbox.write("/repo/pkg/code.py", b"edited\n")
            taken = await worktree.take(sandbox, "/repo", start)
            assert taken and list(taken.changes.files) == ["pkg/code.py"]
            lists.append(start.packed)
    assert (lists[1] == lists[2]) is not installs


async def test_clean_files_of_a_snapshot_are_read_once(repository: Path) -> None:
    task, pool = task_of(f"dir:{repository}"), make(Counting())
    edit = Changes({"pkg/code.py": TreeFile(b"mended\n"), "link": None})
    more = Changes({**edit.files, "pkg/new.py": TreeFile(b"new\n")})
    found = []
    for changes in (edit, edit, edit, more):
        async with pool.for_grading(task) as prepared:
            if len(found) == 2:
                prepared.sandbox.run = refuse  # type: ignore[method-assign,assignment]
            found.append(await prepared.compare(changes))
    clean = {"pkg/code.py": TreeFile(b"broken\n"), "link": TreeFile(b"pkg/code.py", FileKind.LINK)}
    assert found[:3] == [Changes(edit.files, clean)] * 3
    assert found[3] == Changes(more.files, {**clean, "pkg/new.py": None})


BUG = """diff --git a/pkg/code.py b/pkg/code.py
--- a/pkg/code.py
+++ b/pkg/code.py
@@ -1 +1 @@
-broken
+more broken
"""


async def test_grading_gets_the_hidden_tests_back(repository: Path) -> None:
    row = {
        "instance_id": "acme__sums.0123abcd.func__1",
        "repo": "swesmith/acme__sums.0123abcd",
        "image_name": f"dir:{repository}",
        "patch": BUG,
        "problem_statement": "Sums are wrong.",
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
    }
    task = find_converter("swe-smith").to_task(row)  # type: ignore[arg-type]
    async with make(Counting()).for_grading(task) as prepared:
        script = f"git apply -\n{task.grading.test_setup}\ncat pkg/code.py tests/*"
        patch = task.gold_patch.encode()
        done = await prepared.sandbox.run(["sh", "-ec", script], cwd=task.workdir, stdin=patch)
        assert done.exit_code == 0, done.text
        assert done.text == "broken\nassert hidden\n"


async def test_a_setup_that_fails_is_the_images_fault(repository: Path) -> None:
    task = task_of(f"dir:{repository}", setup="git checkout no")
    with pytest.raises(BrokenImageError, match=r"setup of task a__b-1 failed .*no"):
        async with make(Counting()).for_grading(task):
            pass
