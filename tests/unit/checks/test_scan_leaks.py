"""Hiding removes the solution wherever an image holds it, or a scan finds it: no false alarms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.checks import scan_leaks
from swerl.checks.scan_leaks import Leak, LeakKind, removable, scan
from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Exec
from swerl.core.task import GradingSpec, Task
from swerl.tasks.hide_future import hide_future

from .leaks import FIXED, GOLD, MAKE_FIX, SECRET_TEST, git, make_repository, opened, sh


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


SHORT = """\
def add(first, second):
    "Add two numbers."
    return {sum}


def half(number):
    return number / 2
"""
SHORT_GOLD = """\
diff --git a/pkg/total.py b/pkg/total.py
--- a/pkg/total.py
+++ b/pkg/total.py
@@ -1,6 +1,6 @@
 def add(first, second):
     "Add two numbers."
-    return first - second
+    return first + second
 
 
 def half(number):
"""
FIX = """
rm -rf /tmp/.x && git clone -q . /tmp/.x
cd /tmp/.x && git checkout -q --detach && git apply <<'END'
{gold}END
git commit -qam 'Mend it'
git format-patch -q -1 -o /tmp/.x/out
git diff HEAD~1 >/tmp/.x/out/fix
"""
HOME_SITE = "/root/.local/lib/python3.9/site-packages"
PYTHON = """
import bz2, json, lzma, shutil, sys
kind, path, out = sys.argv[1:]
data = b"" if kind == "wheel" else open(path, "rb").read()
if kind == "bz2": open(out, "wb").write(bz2.compress(data))
if kind == "xz": open(out, "wb").write(lzma.compress(data))
if kind == "json": open(out, "w").write(json.dumps({"x": data.decode()}))
if kind == "wheel": shutil.move(shutil.make_archive(out, "zip", path, "pkg"), out)
if kind == "vim": open(out, "wb").write(
    b"b0VIM 8.2" + bytes(4000) + b"\\0".join(reversed(data.split(b"\\n"))))
"""
PLACES: Mapping[str, tuple[str, str]] = {
    "renamed git folder": ("/opt/old-git", "cp -r /tmp/.x/.git /opt/old-git"),
    "clone in /tmp": ("/tmp/clone", "cp -r /tmp/.x /tmp/clone"),
    "clone in /dev/shm": ("/dev/shm/clone", "cp -r /tmp/.x /dev/shm/clone"),
    "nested bare repository": ("/repo/vendor/x.git", "git clone -q --bare /tmp/.x vendor/x.git"),
    "gz": ("/opt/a.gz", "gzip -c $f >/opt/a.gz"),
    "bz2": ("/opt/a", "make bz2 $p /opt/a"),
    "xz": ("/opt/a.xz", "make xz $f /opt/a.xz"),
    "JSON": ("/opt/rows", "make json $p /opt/rows"),
    "windows line ends": ("/opt/dos", "sed 's/$/\\r/' $f >/opt/dos"),
    "build/lib": ("/repo/build/lib", "mkdir -p build/lib/pkg; cp $f build/lib/pkg/total.py"),
    "backup": ("/repo/pkg/total.py.bak", "cp $f pkg/total.py.bak"),
    "editor's backup": ("/repo/pkg/total.py~", "cp $f pkg/total.py~"),
    "Vim's file": ("/repo/pkg/.total.py.swp", "make vim $f pkg/.total.py.swp"),
    "format-patch": ("/repo/0001-Mend-it.patch", "cp /tmp/.x/out/0001-Mend-it.patch ."),
    "diff without context": ("/opt/work.txt", "git -C /tmp/.x diff -U0 HEAD~1 >/opt/work.txt"),
    "diff": ("/var/tmp/x.diff", "cp $p /var/tmp/x.diff"),
    "wheel": (
        "/opt/acme-2.0-py3-none-any.whl",
        "make wheel /tmp/.x /opt/acme-2.0-py3-none-any.whl",
    ),
    "site-packages": (f"{SITE}/pkg", f"mkdir -p {SITE}/pkg; cp $f {SITE}/pkg/total.py"),
    "user's packages": (
        f"{HOME_SITE}/pkg",
        f"mkdir -p {HOME_SITE}/pkg; cp $f {HOME_SITE}/pkg/total.py",
    ),
    "staged": (
        "/repo/.git/index",
        "cp pkg/total.py /tmp/k; cp $f pkg/total.py; git add pkg/total.py; mv /tmp/k pkg/total.py",
    ),
}
INSTALLED = {"site-packages", "user's packages"}


def short_task(folder: Path) -> Task:
    """Write a repository whose fix is one short line."""
    (folder / "pkg").mkdir(parents=True)
    git(folder, "init", "-q", "--template=", "-b", "main")
    (folder / "pkg/total.py").write_text(SHORT.format(sum="first - second"))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Start")
    grading = GradingSpec("command", fail_to_pass=("test",), test_command="python3 t.py")
    base = git(folder, "rev-parse", "HEAD")
    return Task("acme-1", "acme/x", f"dir:{folder}", "/repo", "Mend.", grading, base, SHORT_GOLD)


@pytest.fixture(params=["long", "short"])
def any_task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    make = make_repository if request.param == "long" else short_task
    return make(tmp_path / "image")


@pytest.mark.integration
async def test_every_place_is_cleared_or_found(any_task: Task) -> None:
    task = any_task
    make = 'make() { python3 /tmp/make.py "$@" >/dev/null; }'
    async with opened(task) as sandbox:
        await sandbox.write("/tmp/make.py", PYTHON.encode())
        await sh(sandbox, f"mkdir -p /opt /root; {FIX.format(gold=task.gold_patch)}")
        for _, script in PLACES.values():
            await sh(sandbox, f"f=/tmp/.x/pkg/total.py p=/tmp/.x/out/fix\n{make}\n{script}\n")
        await sh(sandbox, "rm -rf /tmp/.x /tmp/make.py")
        hidden = await hide_future(sandbox, task)
        left = (await scan(sandbox, task)).leaks
        found = {
            name: [leak for leak in left if _is_at(leak.name, path)]
            for name, (path, _) in PLACES.items()
        }
        is_gone = {
            name: any(_is_at(each, path) for each in hidden.removed)
            for name, (path, _) in PLACES.items()
        }
        missed = [name for name in PLACES if not found[name] and not is_gone[name]]
        assert missed == ["staged"], (missed, left, hidden.removed)
        assert await sh(sandbox, "git --no-pager diff --cached") == ""
        # Nothing else raises an alarm, and only packages stay.
        assert sorted(leak.name for leaks in found.values() for leak in leaks) == sorted(
            leak.name for leak in left
        )
        stay = {name for name in PLACES if found[name] and not all(map(removable, found[name]))}
        assert stay == INSTALLED
        files = sorted({removable(leak) for leak in left} - {""})
        vetted = replace(task, certificate={"removed": files})
        await hide_future(sandbox, vetted)
        rest = (await scan(sandbox, vetted)).leaks
        packages = {f"{PLACES[name][0]}/total.py" for name in INSTALLED}
        assert {leak.name for leak in rest} == packages


def _is_at(found: str, path: str) -> bool:
    return found == path or found.startswith((f"{path}/", f"{path}!"))


@pytest.mark.integration
@pytest.mark.parametrize(
    "script",
    [
        "cp pkg/total.py pkg/total.py.bak; gzip -c pkg/total.py >/opt/a.gz",
        "base64 pkg/total.py >/opt/b; tar -cf /opt/a.tar pkg",
        "mkdir /opt/o; cd /opt/o; git init -q; echo x >x; git add x; git commit -qm x; git gc -q",
        "mkdir -p /opt/pkg; cp pkg/total.py /opt/pkg; python3 -m py_compile /opt/pkg/total.py",
        "printf 'return first\\nreturn second\\n    return first + second\\n' >/opt/words",
    ],
)
async def test_copies_of_the_base_and_other_projects_are_no_alarm(
    any_task: Task, script: str
) -> None:
    async with opened(any_task) as sandbox:
        await sh(sandbox, f"mkdir -p /opt; {script}")
        await hide_future(sandbox, any_task)
        found = await scan(sandbox, any_task)
        assert found.leaks == ()
        assert found.unchecked == ()


async def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    task = short_task(tmp_path / "image")
    async with opened(task) as sandbox:
        files = (
            "'7z\\274\\257\\047\\034 closed' >/opt/a.7z; printf 'PK\\003\\004 broken' >/opt/b.zip"
            "; printf 'PACK\\0\\0\\0 objects' >/opt/c.pack"
        )
        await sh(sandbox, f"mkdir -p /opt; printf {files}")
        await hide_future(sandbox, task)
        found = await scan(sandbox, task)
        assert [line.rpartition("/opt/")[2][:4] for line in found.unchecked] == [
            "a.7z",
            "c.pa",
            "b.zi",
        ]


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/opt/a.tar!pkg/total.py", "/opt/a.tar"),
        ("/usr/lib/python3/dist-packages/pkg/total.py", ""),
        ("/opt/venv/lib/python3.9/site-packages/pkg/total.py", ""),
        ("/repo/.git/index", ""),
    ],
)
def test_only_a_file_outside_packages_can_go(path: str, file: str) -> None:
    assert removable(Leak(LeakKind.TEXT, path)) == file
    assert removable(Leak(LeakKind.NAME, path)) == ""
