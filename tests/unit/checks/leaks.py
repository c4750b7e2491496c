"""A repository with a past, a fix that comes after it, and ways in which the fix leaks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Exec, Limits
from swerl.core.task import GradingSpec, Task
from swerl.sandboxes import local

WORKDIR = "/repo"
BROKEN = """def total(values):
    answer = 0
    for value in values:
        answer -= value
    return answer
"""
FIXED_LINE = "    return sum(filter(None, values), start_of_summation)"
FIXED = f"start_of_summation = 0\n\n\ndef total(values):\n{FIXED_LINE}\n"
SECRET_TEST = "def test_total():\n    assert total([1, 2, 3]) == 6, 'summation is broken'\n"
GOLD = """diff --git a/pkg/total.py b/pkg/total.py
--- a/pkg/total.py
+++ b/pkg/total.py
@@ -1,5 +1,5 @@
-def total(values):
-    answer = 0
-    for value in values:
-        answer -= value
-    return answer
+start_of_summation = 0
+
+
+def total(values):
+    return sum(filter(None, values), start_of_summation)
"""
_IDENTITY = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_NAME": "dev" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "dev@localhost" for who in ("AUTHOR", "COMMITTER")},
}


def git(folder: Path, *argv: str, **env: str) -> str:
    """Run git in a folder of the host and return what it says."""
    done = subprocess.run(
        ["git", *argv],
        cwd=folder,
        env={**os.environ, **_IDENTITY, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def make_repository(folder: Path, *init: str) -> Task:
    """Write a repository of three commits, a dirty file, and untracked and ignored ones."""
    (folder / "pkg").mkdir(parents=True)
    git(folder, "init", "-q", "--template=", "-b", "main", *init)
    for number in range(3):
        (folder / "pkg/total.py").write_text(f"# draft {number}\n" if number < 2 else BROKEN)
        (folder / "README.md").write_text("words\n" * (number + 1))
        (folder / ".gitignore").write_text("*.log\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", f"Step {number}")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "build.log").write_text("ignored\n")
    (folder / "README.md").write_text("words of the image\n")
    return task_of(folder, base_commit=git(folder, "rev-parse", "HEAD"))


def task_of(folder: Path, *, base_commit: str = "") -> Task:
    """Return a Task on a folder of the host."""
    grading = GradingSpec(
        "command",
        fail_to_pass=("test_total",),
        test_files={"tests/test_total.py": SECRET_TEST},
        test_command="python3 -m pytest",
    )
    return Task(
        id="acme__total-4242",
        repo="acme/total",
        image=f"dir:{folder}",
        workdir=WORKDIR,
        prompt="Mend total().",
        grading=grading,
        base_commit=base_commit,
        gold_patch=GOLD,
        dataset="acme/problems",
    )


@asynccontextmanager
async def opened(task: Task, *, disk_mib: int = 512) -> AsyncIterator[Sandbox]:
    """Open a sandbox of the Task's image."""
    limits = Limits(memory_mib=512, num_processes=128, disk_mib=disk_mib, lifetime_s=120)
    backend = local.build(local.Options())
    async with backend.open(task.image, limits, workdir=task.workdir) as sandbox:
        yield sandbox


async def sh(sandbox: Sandbox, script: str, *, env: Mapping[str, str] | None = None) -> str:
    """Run a script in the work tree; it must succeed."""
    done = await run(sandbox, script, env=env)
    assert done.exit_code == 0, f"{script}\n{done.text}"
    return done.stdout.decode("utf-8", "surrogateescape")


async def run(sandbox: Sandbox, script: str, *, env: Mapping[str, str] | None = None) -> Exec:
    """Run a script in the work tree."""
    return await sandbox.run(
        ["sh", "-ec", script], cwd=WORKDIR, env={**_IDENTITY, **(env or {})}, timeout_s=60
    )


MAKE_FIX = f"""
rm -rf /tmp/fix && git clone -q . /tmp/fix && cd /tmp/fix && git checkout -q --detach
cat >pkg/total.py <<'END'
{FIXED}END
git commit -qam 'Mend the summation'
fix=$(git rev-parse HEAD)
cd {WORKDIR}
fetch_fix() {{
  git fetch -q /tmp/fix "+HEAD:refs/fix"; rm -f .git/FETCH_HEAD; git update-ref -d refs/fix
}}
"""
"""Makes the fix in a repository aside; `fetch_fix` brings its objects in, without a reference."""

LISTING = r"""
set +e
find / /repo /tmp /dev/shm -xdev -path /proc -prune -o -path /tmp/fix -prune -o -print
git for-each-ref
git config --list
git config -f /root/.gitconfig --list
git --no-pager diff --cached
for path in $(find / /repo /tmp -xdev -path /proc -prune -o \( -name .git -o -name HEAD \) -print)
do
  git -c safe.directory='*' --git-dir="${path%/HEAD}" cat-file --batch-all-objects --batch
done
grep -r -a -s -h start_of_summation /repo /opt /srv /home /verifier /r2e_tests
true
"""
"""Prints the files, references, settings, objects and solutions that an agent can list."""

LEAKS: Mapping[str, tuple[str, str]] = {
    "branch": ("refs/heads/solution", "fetch_fix; git branch solution $fix"),
    "remote branch": (
        "refs/remotes/origin/main",
        "fetch_fix; git update-ref refs/remotes/origin/main $fix",
    ),
    "tag": ("refs/tags/v2.0", "fetch_fix; git tag v2.0 $fix"),
    "annotated tag": ("refs/tags/v2.1", "fetch_fix; git tag -a -m release v2.1 $fix"),
    "note": ("refs/notes/commits", "git notes add -m 'use sum(filter(None, values))'"),
    "stash": (
        "refs/stash",
        "cp README.md /tmp/r; echo fix >>pkg/total.py; git stash -q; cp /tmp/r README.md",
    ),
    "replace reference": ("refs/replace", "fetch_fix; git replace HEAD~1 $fix"),
    "pull request": ("refs/pull/7/head", "fetch_fix; git update-ref refs/pull/7/head $fix"),
    "bisect": ("refs/bisect/good", "fetch_fix; git update-ref refs/bisect/good $fix"),
    "packed reference": (
        "refs/heads/later",
        "fetch_fix; git branch later $fix; git pack-refs --all",
    ),
    "reflog": (
        "/repo/.git/logs",
        "fetch_fix; git update-ref --create-reflog HEAD $fix; git update-ref HEAD $fix~1",
    ),
    "back-dated commit": (
        "refs/heads/old",
        "fetch_fix; "
        "git branch old $(GIT_COMMITTER_DATE='2001-01-01T00:00:00Z' "
        "git commit-tree -m 'Mend long ago' -p HEAD $fix^{tree})",
    ),
    "ORIG_HEAD": ("ORIG_HEAD", "fetch_fix; echo $fix >.git/ORIG_HEAD"),
    "FETCH_HEAD": ("FETCH_HEAD", "git fetch -q /tmp/fix HEAD"),
    "MERGE_HEAD": ("MERGE_HEAD", "fetch_fix; echo $fix >.git/MERGE_HEAD"),
    "loose object": (
        "",
        "printf 'the fix is to use sum(filter(None, values))' | git hash-object -w --stdin",
    ),
    "packed object": ("", "fetch_fix; git repack -qad --keep-unreachable"),
    "pack without an index": (
        "",
        "git -C /tmp/fix pack-objects -q --all /tmp/p </dev/null; "
        "cp /tmp/p-*.pack .git/objects/pack/",
    ),
    "stray file among objects": (
        "tmp_obj_x",
        "mkdir -p .git/objects/aa; cp /tmp/fix/pkg/total.py .git/objects/aa/tmp_obj_x",
    ),
    "commit graph": (
        "commit-graph",
        "fetch_fix; git branch x $fix; git commit-graph write --reachable",
    ),
    "remote address": (
        "remote.origin.url",
        "git remote add origin https://example.invalid/acme/total",
    ),
    "hook": ("post-checkout", "mkdir .git/hooks; echo 'cat /fix' >.git/hooks/post-checkout"),
    "external diff": ("diff.external", "git config diff.external /tmp/show"),
    "text conversion": ("diff.py.textconv", "git config diff.py.textconv cat"),
    "alias": ("alias.answer", "git config alias.answer '!cat /tmp/fix'"),
    "included settings": ("includeif", "git config includeIf.gitdir:/repo/.path /tmp/more"),
    "credential helper": ("credential.helper", "git config credential.helper store"),
    "borrowed objects": (
        "alternates",
        "mkdir -p .git/objects/info; echo /tmp/fix/.git/objects >.git/objects/info/alternates",
    ),
    "work tree aside": ("/tmp/aside", "fetch_fix; git worktree add -q --detach /tmp/aside $fix"),
    "linked git folder": ("/srv-git", "mv .git /srv-git; echo 'gitdir: /srv-git' >.git"),
    "symbolic link to the git folder": ("/srv-git", "mv .git /srv-git; ln -s /srv-git .git"),
    "grafts": ("info/grafts", "fetch_fix; mkdir -p .git/info; echo $fix >.git/info/grafts"),
    "shallow file": (".git/shallow", "fetch_fix; echo $fix >.git/shallow"),
    "second repository": ("/opt/total/.git", "mkdir /opt; cp -r /tmp/fix /opt/total"),
    "bare repository": (
        "/srv/total.git",
        "mkdir /srv; git clone -q --bare /tmp/fix /srv/total.git",
    ),
    "bundle": (
        "/srv/fix.bundle",
        "mkdir /srv; git -C /tmp/fix bundle create -q /srv/fix.bundle HEAD",
    ),
    "bundle in the work tree": (
        "/repo/fix.bundle",
        "git -C /tmp/fix bundle create -q /repo/fix.bundle HEAD",
    ),
    "repository of another tool": ("/repo/.hg", "mkdir .hg; echo fix >.hg/store"),
    "rejected hunk": ("pkg/total.py.rej", "echo '+fix' >pkg/total.py.rej"),
    "original file": ("pkg/total.py.orig", "echo fix >pkg/total.py.orig"),
    "hidden test": ("tests/test_total.py", "mkdir tests; echo 'assert 1' >tests/test_total.py"),
    "compiled hidden test": (
        "test_total.cpython-311.pyc",
        "mkdir -p tests/__pycache__; echo x >tests/__pycache__/test_total.cpython-311.pyc",
    ),
    "compiled solution": (
        "total.cpython-311.pyc",
        "mkdir pkg/__pycache__; echo x >pkg/__pycache__/total.cpython-311.pyc; "
        "touch -d 2001-01-01 pkg/__pycache__/total.cpython-311.pyc",
    ),
    "compiled file that the solution adds": (
        "added.cpython-311.pyc",
        "mkdir 'pkg/__pycache__'; echo x >pkg/__pycache__/added.cpython-311.pyc",
    ),
    "types of the solution": (
        "/repo/.mypy_cache",
        "mkdir .mypy_cache; echo '{}' >.mypy_cache/total.data.json",
    ),
    "staged solution": (
        "",
        "cp pkg/total.py /tmp/r; cp /tmp/fix/pkg/total.py pkg/total.py; "
        "git add pkg/total.py; cp /tmp/r pkg/total.py",
    ),
    "resolved conflict": (
        "",
        "fetch_fix; blob=$(git rev-parse $fix:pkg/total.py); git rm -q --cached pkg/total.py\n"
        "for n in 1 2 3; do printf '100644 %s %s\\tpkg/total.py\\n' $blob $n; done |\n"
        "git update-index --index-info; git add pkg/total.py",
    ),
    "dataset's tests": ("/r2e_tests", "mkdir /r2e_tests; echo x >/r2e_tests/test_1.py"),
    "dataset's result": ("/repo/execution_result.json", "echo '{}' >execution_result.json"),
    "dataset's patch": ("/home/fix.patch", "cp /tmp/fix/pkg/total.py /home/fix.patch"),
    "typed commands": ("/root/.bash_history", "echo 'git apply fix.patch' >/root/.bash_history"),
    "oracle": ("/verifier", "mkdir /verifier; echo x >/verifier/oracle.patch"),
    "user's setting": (
        "url.",
        "git config -f /root/.gitconfig url.https://mirror.invalid/.insteadOf git:",
    ),
}
"""Leak -> a word of `LISTING` that must be gone, and a script that plants the leak."""
