"""A scan finds leaks outside git's history and raises no false alarm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.checks import scan_leaks
from swerl.checks.scan_leaks import Leak, LeakKind, scan
from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Exec
from swerl.core.task import Task
from swerl.tasks.hide_future import hide_future

from .leaks import FIXED, GOLD, MAKE_FIX, SECRET_TEST, make_repository, opened, sh


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_repository(tmp_path / "image")


async def leaks_after(task: Task, files: dict[str, bytes], script: str = "true") -> Sequence[Leak]:
    """Write files, run a script, hide the future, and return the leaks that a scan still finds."""
    async with opened(task) as sandbox:
        for path, data in files.items():
            await sandbox.write(path, data)
        await sh(sandbox, script)
        await hide_future(sandbox, task)
        return (await scan(sandbox, task)).leaks


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/srv/tests.py", SECRET_TEST.encode()),
        ("/srv/__pycache__/total.cpython-39.pyc", b"\0\0start_of_summation\0\0"),
    ],
)
async def test_hidden_tests_and_new_words_are_found(task: Task, path: str, data: bytes) -> None:
    found = await leaks_after(task, {path: data})
    assert [leak.kind for leak in found] == [LeakKind.TEXT]
    assert found[0].name.startswith(path)
    assert 0 < len(found[0].evidence) <= 300


async def test_the_name_of_the_task_is_found_in_files_and_their_names(task: Task) -> None:
    files = {f"/srv/{task.id}.log": b"x", "/srv/job": f"run {task.id}".encode()}
    found = await leaks_after(task, files)
    assert {(leak.kind, leak.name) for leak in found} == {(LeakKind.NAME, name) for name in files}


class Without:
    """A sandbox whose image lacks a program, and has these variables."""

    def __init__(self, real: Sandbox, program: str = "", **env: str) -> None:
        self._real = real
        self._program = program
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def run(self, argv: Sequence[str], **options: Any) -> Exec:
        if argv[0] == self._program:
            return Exec(127, b"", b"not found")
        return await self._real.run(argv, **{"env": self._env, **options})


async def test_variables_with_the_task_are_found(task: Task) -> None:
    async with opened(task) as sandbox:
        await hide_future(sandbox, task)
        found = await scan(Without(sandbox, INSTANCE=task.id, DATA=task.dataset), task)
    names = {(LeakKind.NAME, "INSTANCE"), (LeakKind.NAME, "DATA")}
    assert {(leak.kind, leak.name) for leak in found.leaks} == names


TOOLS = "sh git find sed sort comm grep head tr cut wc mktemp rm mkdir cat stat readlink xargs tar"


async def test_without_python_plain_files_are_searched(task: Task) -> None:
    async with opened(task) as sandbox:
        await sandbox.write("/opt/lib/total.py", FIXED.encode())
        await sh(sandbox, f"for t in {TOOLS}; do ln -s $(command -v $t) /opt/lib; done")
        await hide_future(sandbox, task)
        found = await scan(Without(sandbox, "python3", PATH="/opt/lib"), task)
    assert found.leaks == (Leak(LeakKind.TEXT, "/opt/lib/total.py"),)
    assert any("python3" in reason for reason in found.unchecked)


async def test_a_scan_changes_nothing(task: Task) -> None:
    async with opened(task) as sandbox:
        await sh(sandbox, f"{MAKE_FIX} fetch_fix; git tag later $fix; rm -rf /tmp/fix")
        listing = "find . -type f -exec sha256sum {} + | sort"
        before = await sh(sandbox, listing)
        await scan(sandbox, task)
        assert await sh(sandbox, listing) == before


async def test_files_that_there_is_no_time_to_read_are_counted(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = scan_leaks._program()
    late = program.replace('time.time() + request["budget_s"]', "time.time() - 1")
    assert late != program
    monkeypatch.setattr(scan_leaks, "_program", lambda: late)
    async with opened(task) as sandbox:
        found = await scan(sandbox, task)
    [reason] = found.unchecked
    assert re.fullmatch(r"out of time: [\d,]+ files of [\d,]+ MiB were not read", reason)


async def test_a_word_of_another_file_is_no_leak_in_compiled_python(task: Task) -> None:
    news = "diff --git a/NEWS.md b/NEWS.md\n--- a/NEWS.md\n+++ b/NEWS.md\n@@ -1 +1 @@\n-a\n+"
    task = replace(task, gold_patch=f"{news}specification\n")
    assert not await leaks_after(task, {"/srv/__pycache__/a.pyc": b"\0\0specification\0\0"})


IDIOM = "{0}_type{1}{0}_value{1}{0}_traceback{1}".format("exc", ": BaseException | None,\n")
OWN = "".join(f"    registered_sums_{number}.close_quietly()\n" for number in range(9))
SITE = "/opt/venv/lib/python3.9/site-packages"


@pytest.mark.parametrize(
    ("path", "text", "is_found"),
    [
        (f"{SITE}/other/lock.py", IDIOM, False),
        (f"{SITE}/other/lock.pyc", "\0exc_traceback\0BaseException\0", False),
        (f"{SITE}/pkg/total.py", IDIOM, True),
        (f"{SITE}/pkg/renamed.py", IDIOM + OWN, True),
        ("/srv/notes", IDIOM, True),
    ],
)
async def test_idioms_are_no_leak(task: Task, path: str, text: str, is_found: bool) -> None:
    added = "".join(f"+{line}\n" for line in (IDIOM + OWN).splitlines())
    task = replace(task, gold_patch=f"{GOLD.partition('@@')[0]}@@ -0,0 +1,12 @@\n{added}")
    assert is_found is bool(await leaks_after(task, {path: text.encode()}))
