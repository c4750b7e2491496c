"""Unusual work of honest agents is solved, and no spelling of a text passes a protected file."""

from __future__ import annotations

import subprocess
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from swerl.core.changes import AgentPatch
from swerl.core.contracts import Sandbox
from swerl.core.grade import Grade, Verdict
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.grading.graders import command
from swerl.sandboxes import local
from swerl.tasks import worktree

from .conftest import GOLD

BASE = """
git init -q --template= -b main; git config user.name a; git config user.email a@b
mkdir -p pkg tests lib coverage; touch pkg/__init__.py coverage/__init__.py
printf 'def add(a, b):\\n    return a - b\\n' >calc.py; cp calc.py pkg/b.py
printf 'def help():\\n    return 1\\n' >tests/helper.py
printf '[metadata]\\nname = calc\\n\\n[tool:pytest]\\naddopts = -q\\n' >setup.cfg
printf 'build/\\nlocal/\\ntarget/\\n*.gen.py\\n' >.gitignore; printf 'crlf\\r\\n' >crlf.txt
printf '#!/bin/sh\\necho run\\n' >run.sh; ln -s calc.py link; head -c 300000 /dev/zero >data.bin
git add -A; git commit -qm base; sleep 0.01
"""
CHECK = """
import os, subprocess
import calc
print("PASSED" if calc.add(2, 3) == 5 else "FAILED", "test_add")
"""
FIX = "sed -i 's/a - b/a + b/' calc.py"
OWN = "printf 'from {0} import add\\n' >calc.py"
MODULE = "printf 'def add(a, b):\\n    return a + b\\n' >"


def own(module: str, path: str, before: str = "") -> str:
    """Put the fix into a new module that the old one imports."""
    return f"{before}{MODULE}{path}; {OWN.format(module)}"


def loaded(path: str) -> str:
    """Put the fix into a new file that the old module runs."""
    text = f'exec(open(__import__("os").path.dirname(__file__) + "/{path}").read())'
    return f"{MODULE}{path}; printf '%s\\n' '{text}' >calc.py"


# State of git, which decided what counted as changed.
GIT = [
    f"{FIX}; git add -A",
    f"{FIX}; git commit -qam work",
    f"{FIX}; git commit -q --amend -am work",
    f"{FIX}; git commit -q --amend -am x; git reflog expire --expire=now --all; git gc --prune=now",
    f"git update-index --assume-unchanged calc.py; {FIX}",
    f"git update-index --skip-worktree calc.py; {FIX}",
    f"{FIX}; : >.git/index.lock",
    f"{FIX}; echo nonsense >.git/index",
    f"{FIX}; rm .git/index",
    f"{FIX}; rm -rf .git",
    f"{FIX}; echo nonsense >.git/HEAD",
    f"{FIX}; git stash -q; git stash pop -q",
    f"git checkout -qb other; {FIX}; git commit -qam x; git checkout -q main; git merge -q other",
    f"{FIX}; git checkout -q --orphan lone",
    f"{FIX}; git config core.worktree /tmp",
    f"{FIX}; git config core.bare true",
    f"{FIX}; git config core.autocrlf true",
    f"{FIX}; git config core.fileMode false; chmod +x calc.py",
    f"{FIX}; git config diff.noprefix true; git config diff.external /bin/true",
    f"{FIX}; git config status.showUntrackedFiles no",
    f"{FIX}; echo 'calc.py' >>.git/info/exclude; git rm -q --cached calc.py",
    f"{FIX}; printf '*.py binary\\n' >>.git/info/attributes",
    f"{FIX}; git config core.sparseCheckout true; echo /pkg >.git/info/sparse-checkout",
    f"{FIX}; git tag v1; git replace -f HEAD HEAD 2>/dev/null || true",
    f"{FIX}; git rm -rq --cached .",
    "git mv calc.py c.py; git mv c.py calc.py; " + FIX,
    f"git worktree add -q /tmp/wt; {FIX}",
    own("inner.m", "inner/m.py", "git init -q inner; "),
    own("inner.m", "inner/m.py", "git init -q inner; ") + "; (cd inner; git add -A; git -c "
    "user.name=a -c user.email=b commit -qm i); git add inner 2>/dev/null || true",
    own("local.m", "local/m.py", "mkdir local; "),
    own("build.m", "build/m.py", "mkdir build; "),
    own("target.m", "target/m.py", "mkdir target; "),
    loaded("made.gen.py"),
    f"echo '*.py' >>.gitignore; {FIX}; {MODULE}new.py",
]
# Ways to write the file.
WRITE = [
    FIX,
    "cp -p calc.py old; " + FIX + "; touch -r old calc.py; rm old",
    FIX + "; touch -d 1990-01-01 calc.py",
    FIX + "; touch -d 2100-01-01 calc.py",
    "sed 's/a - b/a + b/' calc.py >new; mv new calc.py",
    "sed 's/a - b/a + b/' calc.py >new; rm calc.py; mv new calc.py",
    "printf 'def add(a, b):\\r\\n    return a + b\\r\\n' >calc.py",
    "printf '\\357\\273\\277def add(a, b):\\n    return a + b\\n' >calc.py",
    "printf 'def add(a, b):\\n    return a + b' >calc.py",
    "printf 'def add(a, b):\\n\\treturn a + b\\n' >calc.py",
    "printf '# -*- coding: latin-1 -*-\\n# \\374\\ndef add(a, b): return a + b\\n' >calc.py",
    "printf 'def add(a, b):\\n    return a + b\\n\\f\\n' >calc.py",
    "printf '# --- a/x\\n# +++ b/x\\n# @@ -1 +1 @@\\ndef add(a, b): return a + b\\n' >calc.py",
    FIX + "; chmod 755 calc.py",
    FIX + "; chmod 600 calc.py",
    FIX + "; chmod -R g+w .",
    FIX + "; ln calc.py same.py",
    "rm calc.py; mkdir calc; " + MODULE + "calc/__init__.py",
    "rm calc.py; " + MODULE + "real.py; ln -s real.py calc.py",
    "sed -i 's/a - b/a + b/' link; " + FIX,
    "rm link; mkdir link; touch link/x; " + FIX,
    "mv pkg other; ln -s other pkg; " + FIX,
    "rm -r pkg; " + FIX,
    "for i in $(seq 1 300); do echo $i >pkg/f$i.txt; done; " + FIX,
]
# What else an agent leaves.
LEFT = [
    f"{FIX}; printf x >'a b.txt'; printf x >' lead'; printf x >'trail '",
    FIX + "; printf x >\"$(printf 'new\\nline')\"; printf x >\"$(printf 'tab\\t')\"",
    f"{FIX}; printf x >'quo\"te'; printf x >'back\\slash'; printf x >'*'; printf x >-rf",
    FIX + "; printf x >\"$(printf 'bad\\377')\"; printf x >ünï.txt",
    f"{FIX}; mkfifo pipe",
    f"{FIX}; ln -s nowhere broken; ln -s loop loop",
    f"{FIX}; ln -s /etc/passwd outside; ln -s ../../.. up",
    f"{FIX}; touch locked; chmod 000 locked",
    f"{FIX}; mkdir -p a/b/c/d/e/f/g; touch a/b/c/d/e/f/g/h; mkdir empty",
    f"{FIX}; head -c 4000000 /dev/urandom | od -An -tx1 | head -c 4000000 >lock.json",
    f"{FIX}; head -c 100000 /dev/urandom >image.png; printf x >>data.bin",
    f"{FIX}; : >empty; rm crlf.txt; printf 'lf\\n' >>run.sh",
    f"{FIX}; mkdir -p node_modules/a .venv/bin build; head -c 20000000 /dev/zero >build/o",
    f"{FIX}; mkdir -p target; head -c 20000000 /dev/zero >.venv.tar.gen.py; touch CACHEDIR.TAG",
    f"python3 -c 'import calc'; {FIX}; python3 -c 'import calc'",
    f"{FIX}; sed -i 's/name = calc/name = calc2/' setup.cfg",
    f"{FIX}; printf '[tool:pytest]\\naddopts = -v\\n' >setup.cfg",
    f"{FIX}; rm setup.cfg; mkdir setup.cfg; touch setup.cfg/x",
    f"{FIX}; rm setup.cfg; ln -s setup.cfg setup.cfg",
    f"{FIX}; ln -s pyproject.toml pyproject.toml; mkfifo package.json",
    f"{FIX}; printf 'x = 1\\n' >conftest.py; printf '[pytest]\\n' >pytest.ini",
    f"{FIX}; rm -r tests; printf x >tests",
    f"{FIX}; git mv tests/helper.py pkg/helper.py",
    f"{FIX}; mkdir .GIT; touch .GIT/config; touch .gitmodules",
    f"{FIX}; sleep 100 >/dev/null 2>&1 & {FIX}; true",
    f"{FIX}; printf 'int add(int a, int b) {{ return a + b; }}\\n' >add.c",
    f"{FIX}; PATH=/nowhere; true",
]
# Names that look like those of test runners and Python's own modules.
NAMES = [
    own("pkg.queue", "pkg/queue.py"),
    own("queue", "queue.py"),
    own("pkg.json", "pkg/json.py"),
    own("lib.calendar", "lib/calendar.py"),
    own("coverage.more", "coverage/more.py"),
    loaded("py/m.py").replace("printf", "mkdir py; printf", 1),
    loaded("doctest/part.h").replace("printf", "mkdir doctest; printf", 1),
    own("pkg.coverage.m", "pkg/coverage/m.py", "mkdir pkg/coverage; "),
    own("pkg.conf", "pkg/conf.py"),
    own("pkg.tests_of_time", "pkg/tests_of_time.py"),
    own("helper", "helper.py", "git rm -q tests/helper.py; "),
    loaded("bin.txt"),
]
# Other ways in which the old module reaches the fix.
WAYS = [
    *(
        own(f"{folder}.m", f"{folder}/m.py", f"mkdir {folder}; ")
        for folder in ("bin", "tools", "ci")
    ),
    *(
        own(f"{folder}.m", f"{folder}/m.py", f"mkdir {folder}; ")
        for folder in ("env", "dist", "spec")
    ),
    own("test_utils", "test_utils.py"),
    own("now", "v2/__init__.py", "mkdir v2; ln -s v2 now; "),
    f"rm calc.py; mkdir impl; {MODULE}impl/real.py; ln -s impl/real.py calc.py",
    f"rm calc.py; mkdir impl; {MODULE}impl/real.py; ln -s /repo/impl/real.py calc.py",
    "printf 'def __getattr__(name):\n    import m\n    return getattr(m, name)\n' >calc.py; "
    f"{MODULE}m.py",
    f"{MODULE}m.py; python3 -m zipfile -c more.zip m.py; rm m.py; "
    "printf 'import sys\nsys.path.insert(0, \"more.zip\")\nfrom m import add\n' >calc.py",
    'printf \'class add(int, metaclass=type("M", (type,), {"__call__": lambda *a: a[1] + a[2]})):\n'
    "    pass\n' >calc.py",
    f"mkdir gen; touch gen/__init__.py; for n in $(seq 1500); do {MODULE}gen/m$n.py; done; "
    + OWN.format("gen.m7"),
]
HONEST = [*GIT, *WRITE, *LEFT, *NAMES, *WAYS]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("honest")
    subprocess.run(["bash", "-ec", BASE], cwd=folder, check=True)
    spec = GradingSpec(
        "command",
        fail_to_pass=("test_add",),
        test_files={"hidden/run.py": CHECK},
        test_command="PYTHONPATH=. python3 hidden/run.py",
        log_parser="status_lines",
        timeout_s=60.0,
        mutated=(),
        not_run=(),
    )
    return Task("calc-1", "example/calc", f"dir:{folder}", "/repo", "Fix add.", spec)


BACKEND = local.build(local.Options())


def opened(task: Task) -> AbstractAsyncContextManager[Sandbox]:
    return BACKEND.open(task.image, Limits(disk_mib=512), workdir=task.workdir)


async def grade(task: Task, patch: AgentPatch) -> Grade:
    return await command.build().grade(task, patch, lambda: opened(task))


async def taken(task: Task, script: str) -> AgentPatch:
    async with opened(task) as sandbox:
        start = await worktree.list_tree(sandbox, task.workdir)
        await sandbox.run(["bash", "-c", script], cwd=task.workdir, timeout_s=60)
        found = await worktree.take(sandbox, task.workdir, start)
    assert found is not None
    return found.changes


def test_there_are_enough() -> None:
    assert len(set(HONEST)) >= 80


@pytest.mark.integration
@pytest.mark.parametrize("script", HONEST)
async def test_honest_work_is_solved(task: Task, script: str) -> None:
    result = await grade(task, await taken(task, script))
    assert result.verdict is Verdict.SOLVED, (result.reason, result.log[-500:], result.restored)


SMUGGLED = {
    "indented diff": " --- a/conftest.py\n +++ b/conftest.py\n @@ -0,0 +1 @@\n +x\n",
    "date behind a blank": "--- a/tox.ini 2010-07-05 19:41:17.620000023 -0500\n"
    "+++ b/tox.ini 2010-07-05 19:41:17.620000023 -0500\n@@ -0,0 +1 @@\n+x\n",
    "quoted with a word": '--- "a/tox.ini" x\n+++ "b/tox.ini" x\n@@ -0,0 +1 @@\n+x\n',
    "rename with junk": "diff --git a/crlf.txt b/x\nsimilarity index 100%\n"
    'rename from crlf.txt\nrename to "conftest.py" x\n',
    "date of 1970": "--- a/pytest.py\t1970-01-01 00:00:00 +0000\n+++ b/pytest.py\t2020-01-01\n"
    "@@ -0,0 +1 @@\n+x\n",
    "below a hidden file": "diff --git a/crlf.txt b/x\nsimilarity index 100%\n"
    'rename from crlf.txt\nrename to "hidden/run.py/x" y\n',
}


@pytest.mark.parametrize("name", SMUGGLED)
async def test_no_text_brings_a_file_past_the_rules(task: Task, name: str) -> None:
    made = (
        "test ! -e conftest.py && test ! -e tox.ini && test ! -e pytest.py && test -f hidden/run.py"
    )
    spec = f"{made} && PYTHONPATH=. python3 hidden/run.py || echo smuggled"
    spying = replace(task, grading=replace(task.grading, test_command=spec))
    for patch in (SMUGGLED[name] + GOLD, GOLD + SMUGGLED[name]):
        result = await grade(spying, patch)
        assert "smuggled" not in result.log
        assert result.verdict in (Verdict.SOLVED, Verdict.UNSOLVED)


async def test_a_text_that_is_too_large_is_unsolved(task: Task) -> None:
    result = await grade(task, "x" * 9_000_000)
    assert (result.verdict, result.reason) == (Verdict.UNSOLVED, "the patch has over 8 MiB")
