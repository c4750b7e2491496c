"""A scan finds leaks outside git's history and raises no false alarm."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swerl.checks import scan_leaks
from swerl.checks.scan_leaks import Leak, LeakKind, scan
from swerl.cli.main import typer_app
from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Exec
from swerl.core.task import Task, write_tasks
from swerl.tasks.hide_future import hide_future

from .leaks import FIXED, FIXED_LINE, GOLD, MAKE_FIX, SECRET_TEST, git, make_repository, opened, sh


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


def archive(name: str, text: str) -> bytes:
    """Return a zip file that holds one file."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(name, text)
    return data.getvalue()


async def test_an_image_with_nothing_in_it_raises_no_alarm(task: Task) -> None:
    async with opened(task) as sandbox:
        raw = await scan(sandbox, task)
    assert {leak.kind for leak in raw.leaks} <= {LeakKind.REFLOG}
    assert not raw.unchecked


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/repo/notes.txt", FIXED.encode()),
        ("/opt/lib/total.py", FIXED.encode()),
        ("/srv/answer.bin.txt", GOLD.encode()),
        ("/srv/rows.jsonl", json.dumps({"patch": GOLD}).encode()),
        ("/srv/tests.py", SECRET_TEST.encode()),
        ("/srv/acme_total-2.0-py3-none-any.whl", archive("pkg/total.py", FIXED)),
        ("/srv/old.zip", archive("a/fix.diff", GOLD)),
        ("/srv/__pycache__/total.cpython-39.pyc", b"\0\0start_of_summation\0\0"),
    ],
)
async def test_lines_of_the_solution_are_found_in_any_file(
    task: Task, path: str, data: bytes
) -> None:
    found = await leaks_after(task, {path: data})
    assert [leak.kind for leak in found] == [LeakKind.TEXT]
    assert found[0].name.startswith(path)
    assert 0 < len(found[0].evidence) <= 300


async def test_lines_that_the_base_has_give_nothing_away(task: Task) -> None:
    folder = Path(task.image.removeprefix("dir:"))
    (folder / "pkg/other.py").write_text(f"def other(values):\n{FIXED_LINE}\n")
    git(folder, "add", "pkg/other.py")
    git(folder, "commit", "-qm", "Add another")
    own = replace(task, base_commit="")
    assert await leaks_after(own, {"/srv/copy.py": f"{FIXED_LINE}\n".encode()}) == ()


@pytest.mark.parametrize(("version", "kinds"), [("9.0", [LeakKind.PACKAGE]), ("0.5", [])])
async def test_an_installed_copy_counts_where_it_is_newer(
    task: Task, version: str, kinds: list[LeakKind]
) -> None:
    site = "/opt/venv/lib/python3.11/site-packages"
    found = await leaks_after(
        task,
        {
            f"{site}/pkg/total.py": b"def total(values):\n    return 'another way to do it'\n",
            f"{site}/pkg-{version}.dist-info/METADATA": b"Name: pkg\n",
            "/repo/setup.py": b'version = "1.0"\n',
        },
    )
    assert [leak.kind for leak in found] == kinds


async def test_a_private_key_that_everybody_can_read_is_a_secret(task: Task) -> None:
    key = b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"
    found = await leaks_after(task, {"/root/deploy": key}, "chmod 644 /root/deploy")
    assert [(leak.kind, leak.name) for leak in found] == [(LeakKind.SECRET, "/root/deploy")]


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


async def test_variables_with_the_task_or_a_secret_are_found(task: Task) -> None:
    async with opened(task) as sandbox:
        await hide_future(sandbox, task)
        marked = Without(sandbox, INSTANCE=task.id, FORGE_TOKEN="abc", DATA=task.dataset)
        found = await scan(marked, task)
    names = {(LeakKind.NAME, "INSTANCE"), (LeakKind.SECRET, "FORGE_TOKEN"), (LeakKind.NAME, "DATA")}
    assert {(leak.kind, leak.name) for leak in found.leaks} == names
    assert all("abc" not in leak.evidence for leak in found.leaks)


async def test_what_cannot_be_checked_is_said(task: Task) -> None:
    async with opened(task) as sandbox:
        await hide_future(sandbox, task)
        found = await scan(Without(sandbox, "python3"), task)
    assert any("python3" in reason for reason in found.unchecked)


TOOLS = "sh git find sed sort comm grep head tr cut wc mktemp rm mkdir cat stat readlink xargs tar"


async def test_without_python_plain_files_are_searched(task: Task) -> None:
    async with opened(task) as sandbox:
        await sandbox.write("/opt/lib/total.py", FIXED.encode())
        await sh(sandbox, f"for t in {TOOLS}; do ln -s $(command -v $t) /opt/lib; done")
        await hide_future(sandbox, task)
        found = await scan(Without(sandbox, "python3", PATH="/opt/lib"), task)
    assert [(leak.kind, leak.name) for leak in found.leaks] == [
        (LeakKind.TEXT, "/opt/lib/total.py")
    ]
    assert any("python3" in reason for reason in found.unchecked)


def test_the_command_resumes_and_fails_on_leaks_that_remain(task: Task, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "scanned.jsonl"
    folder = Path(task.image.removeprefix("dir:"))
    git(folder, "tag", "v9", git(folder, "commit-tree", "-m", "Mend", "HEAD^{tree}"))
    write_tasks(tasks, [task])
    command = ["tasks", "scan-leaks", str(tasks), "--out", str(out), "--json"]
    first = CliRunner().invoke(typer_app, command)
    assert first.exit_code == 0, first.output
    [row] = json.loads(first.stdout)
    assert row["ok"]
    assert "refs/tags/v9" in {leak["name"] for leak in row["raw"]["leaks"]}
    assert row["for_agent"]["leaks"] == []
    assert CliRunner().invoke(typer_app, command).exit_code == 0
    assert len(out.read_text().splitlines()) == 1
    (folder / "answer.txt").write_text(FIXED)
    write_tasks(tasks, [replace(task, prompt="Mend it.")])
    third = CliRunner().invoke(typer_app, command)
    assert third.exit_code == 1
    assert len(out.read_text().splitlines()) == 2
    table = CliRunner().invoke(typer_app, ["tasks", "scan-leaks", str(tasks), "--for-agent"])
    assert "/repo/answer.txt" in table.stdout


def test_a_task_that_cannot_be_opened_is_a_failure_of_its_own(task: Task, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [replace(task, id="gone__gone-1", image="dir:/nowhere"), task])
    done = CliRunner().invoke(typer_app, ["tasks", "scan-leaks", str(tasks), "--json"])
    assert done.exit_code == 1
    gone, here = json.loads(done.stdout)
    assert "/nowhere" in gone["failure"]
    assert here["ok"]


@pytest.mark.parametrize("line", ['{"no": "result"}', "[1, 2]", '{"task": 1}'])
def test_a_file_of_something_else_is_not_written_over(
    task: Task, tmp_path: Path, line: str
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    write_tasks(tasks, [task])
    out.write_text(line + "\n")
    done = CliRunner().invoke(typer_app, ["tasks", "scan-leaks", str(tasks), "--out", str(out)])
    assert done.exit_code != 0
    assert out.read_text() == line + "\n"


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
    assert re.fullmatch(r"text: out of time: [\d,]+ files of [\d,]+ MiB were not read", reason)
