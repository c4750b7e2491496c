"""Prepare a clean sandbox: lay the accepted part of an agent's Changes, write the tests.

A patch that is known only as a text is applied in a clean sandbox of its own, which is thrown away
once its tree was taken. So a hostile text can do no more there than an agent in its sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swerl.core.changes import MAX_PATCH_BYTES, AgentPatch, Changes, touched
from swerl.core.contracts import OpenClean, Sandbox
from swerl.core.errors import BrokenImageError
from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task, file_bytes
from swerl.grading.accept import (
    SOURCE_ROOTS,
    CleanTree,
    accept,
    commands,
    new_modules,
    script_text,
    scripts_to_read,
)
from swerl.tasks import worktree
from swerl.tasks.hide_future import Stage, hide_future

_TIMEOUT_S = 120.0
"""Seconds for applying the test patch: ten times the time of the largest known one."""
_APPLY_S = 60.0
"""Seconds for applying an agent's text; a longer time is the text's fault."""

_GIT = r"""
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
run_git() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
"""
_APPLY = r"""
by_patch() { patch --batch --forward --fuzz=5 -p1 "$@" -i "$diff"; }
diff=$(mktemp) && cat >"$diff" || exit 90
run_git apply --whitespace=nowarn "$diff" ||
run_git apply --whitespace=nowarn --ignore-whitespace "$diff" ||
{ by_patch --dry-run && by_patch --no-backup-if-mismatch; } || exit 91
"""
_APPLY_TESTS = r"""
base=$1; shift
tests=$(mktemp) && cat >"$tests" || exit 90
if run_git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  run_git rev-parse -q --verify "${base:=HEAD}^{commit}" >/dev/null 2>&1 || base=HEAD
  for path do
    if run_git cat-file -e "$base:$path" 2>/dev/null
    then run_git checkout -q "$base" -- "$path" || exit 92
    else rm -rf -- "$path"
    fi
  done
fi
run_git apply --whitespace=nowarn "$tests" || exit 92
rm -f "$tests"
"""
# The places where programs of Python look for packages, whatever environment the tests choose.
_MODULES = r"""
places() {
  for python in python3 python; do
    (cd / && "$python" -c 'import sys; print("\n".join(sys.path))') 2>/dev/null
  done
  for base in /usr /usr/local /opt/* /opt/*/envs/* /opt/*/* /root/* /root/.[a-z]* \
    /root/*/envs/* /root/.*/versions/* /home/*/* /home/*/.[a-z]* /home/*/*/envs/* /* ./* ./.[a-z]* \
    "$HOME/.local" "$VIRTUAL_ENV" "$CONDA_PREFIX"
  do
    for place in "$base"/lib/python3*/site-packages "$base"/lib/python3*/dist-packages
    do [ -d "$place" ] && printf '%s\n' "$place"
    done
  done
}
searched=$(places | sort -u)
for name do
  for root in . src lib; do
    for file in "$root/$name.py" "$root/$name/__init__.py" "$root/$name".*.so
    do [ -e "$file" ] && printf 'owned %s %s\n' "$root" "$name"
    done
  done
  printf '%s\n' "$searched" | while read -r place; do
    for file in "$place/$name" "$place/$name.py" "$place/$name".*.so
    do [ -e "$file" ] && printf 'installed . %s\n' "$name"
    done
  done
done
for root in src lib; do
  if [ -e "$root/__init__.py" ]; then continue; fi
  held=
  for file in "$root"/*.py "$root"/*/__init__.py; do [ -e "$file" ] && held=1; done
  if [ "$held" ] || grep -qsw -- "$root" setup.py setup.cfg pyproject.toml pytest.ini tox.ini \
    conftest.py noxfile.py Makefile
  then printf 'searched %s .\n' "$root"
  fi
done
exit 0
"""
# Print the beginnings of the files that exist.
_READ = r"""
for path do
  [ -f "$path" ] || continue
  printf '%s\0' "$path"
  head -c 65536 -- "$path" | tr -d '\0'
  printf '\0'
done
"""
_TOO_LARGE = "the patch changes too many or too large files"
_MODULES_AT_ONCE = 500
"""New modules that one command looks for: more names would not fit into a command line."""
_SCRIPT_DEPTH = 3
"""Levels of scripts that run further scripts."""
_PATCH_REFUSED, _TESTS_REFUSED = 91, 92

_SET_UP = r"""
rm -rf -- "$1" && bash -s
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A work tree ready for the tests, or the Grade of the failure."""

    restored: tuple[str, ...] = ()
    failure: Grade | None = None


async def changes_of(task: Task, patch: AgentPatch, open_clean: OpenClean) -> Changes | Grade:
    """Return what a patch changes, or the Grade if it is a text that does not apply."""
    if isinstance(patch, Changes):
        return patch
    if not patch.strip():
        return Changes({}, {})
    text = (patch.removesuffix("\n") + "\n\n").encode("utf-8", "surrogateescape")
    if len(text) > MAX_PATCH_BYTES:
        return Grade(Verdict.UNSOLVED, reason=f"the patch has over {MAX_PATCH_BYTES >> 20} MiB")
    kept = touched(task.gold_patch)
    async with open_clean() as sandbox:
        start = await worktree.list_tree(sandbox, task.workdir, kept=kept)
        done = await sandbox.run(_shell(_APPLY), cwd=task.workdir, timeout_s=_APPLY_S, stdin=text)
        if done.exit_code == _PATCH_REFUSED:
            return Grade(Verdict.UNSOLVED, reason="patch does not apply", log=done.text)
        if done.exit_code:
            reason = f"the patch was not applied within {_APPLY_S:g} s (exit code {done.exit_code})"
            return Grade(Verdict.UNSOLVED, reason=reason, log=done.text)
        taken = await worktree.take(sandbox, task.workdir, start, kept=kept, ignores=False)
    return taken.changes if taken else Grade(Verdict.UNSOLVED, reason=_TOO_LARGE)


async def prepare(
    task: Task,
    changes: Changes,
    sandbox: Sandbox,
    mutate: Callable[[Sandbox], Awaitable[object]] | None = None,
) -> Prepared:
    """Lay the accepted part of the Changes, and write the tests.

    `mutate` is called before a set-up runs: that may build the patch, whose code could then keep
    the tests as they are.
    """
    if changes.before is None:
        compared = await worktree.compare(sandbox, task.workdir, changes)
        if compared is None:
            return Prepared(failure=Grade(Verdict.UNSOLVED, reason=_TOO_LARGE))
        changes = compared
    clean = await _clean_tree(task, changes, sandbox) if changes.files else CleanTree()
    accepted = accept(task, changes, clean)
    blocked = await worktree.lay(sandbox, task.workdir, accepted.changes)
    if blocked is None:
        reason = "the changed files could not be written"
        return Prepared(accepted.dropped, Grade(Verdict.UNSOLVED, reason=reason))
    restored = tuple(dict.fromkeys((*accepted.dropped, *blocked)))
    failure = await _apply_tests(task, sandbox, has_patch=bool(changes.files))
    if not failure:
        for path, text in task.grading.test_files.items():
            await sandbox.write(f"{task.workdir}/{path}", text.encode())
        await bring_files(task, sandbox)
        if mutate and task.grading.test_setup:
            await mutate(sandbox)
        failure = await _set_up(task, sandbox)
    return Prepared(restored, failure)


async def bring_files(task: Task, sandbox: Sandbox) -> None:
    """Write the hidden files outside the work tree, over existing ones."""
    for path, text in task.grading.files.items():
        await sandbox.write(path, file_bytes(text))


async def _apply_tests(task: Task, sandbox: Sandbox, *, has_patch: bool) -> Grade | None:
    spec = task.grading
    if not spec.test_patch:
        return None
    text = spec.test_patch.removesuffix("\n") + "\n\n"
    end = await sandbox.run(
        [*_shell(_APPLY_TESTS), task.base_commit, *touched(spec.test_patch)],
        cwd=task.workdir,
        timeout_s=_TIMEOUT_S,
        stdin=text.encode("utf-8", "surrogateescape"),
    )
    if not end.exit_code:
        return None
    verdict, reason = Verdict.INVALID, "the test patch does not apply to the base"
    if end.exit_code != _TESTS_REFUSED:
        verdict = Verdict.INFRA
        reason = f"the work tree could not be prepared (exit code {end.exit_code})"
    elif has_patch:
        verdict, reason = Verdict.UNSOLVED, "the test patch does not apply on top of the patch"
    return Grade(verdict, reason=reason, log=end.text)


async def _scripts(task: Task, sandbox: Sandbox) -> dict[str, str]:
    """Return the texts of the repository's scripts that the test command runs, by path."""
    texts: dict[str, str] = {}
    known = "\n".join(commands(task.grading))
    for _ in range(_SCRIPT_DEPTH):
        missing = sorted(scripts_to_read(known) - set(texts))
        if not missing:
            break
        read = await sandbox.run(
            ["sh", "-c", _READ, "sh", *missing], cwd=task.workdir, timeout_s=_TIMEOUT_S
        )
        pieces = read.stdout.decode("utf-8", "replace").split("\0")
        found = dict(zip(pieces[::2], pieces[1::2], strict=False))
        texts.update({path: script_text(path, found.get(path, "")) for path in missing})
        # The next round searches only the scripts that this round has found.
        known = "\n".join(texts[path] for path in missing)
    return texts


async def _clean_tree(task: Task, changes: Changes, sandbox: Sandbox) -> CleanTree:
    """Return facts of the clean tree, before anything is laid."""
    scripts = await _scripts(task, sandbox)
    added = sorted({name for _, name in new_modules(changes) if name.isidentifier()})
    if not added:
        return CleanTree(scripts)
    lines: list[list[str]] = []
    for at in range(0, len(added), _MODULES_AT_ONCE):
        names = added[at : at + _MODULES_AT_ONCE]
        done = await sandbox.run(
            ["sh", "-c", _MODULES, "sh", *names], cwd=task.workdir, timeout_s=_TIMEOUT_S
        )
        lines += [line.split(" ", 2) for line in done.stdout.decode(errors="replace").splitlines()]
        # Without an answer, each of them may shadow an installed package.
        lines += [["installed", ".", name] for name in names] if done.exit_code else []
    found = [(kind, "" if root == "." else root, name) for kind, root, name in lines]
    spec = task.grading
    text = "\n".join([*commands(spec), *spec.env.values()])
    return CleanTree(
        scripts,
        installed=frozenset(name for kind, _, name in found if kind == "installed"),
        owned=frozenset((root, name) for kind, root, name in found if kind == "owned"),
        searched=frozenset(root for kind, root, _ in found if kind == "searched")
        | {root for root in SOURCE_ROOTS if re.search(rf"\b{root}\b", text)},
    )


async def _set_up(task: Task, sandbox: Sandbox) -> Grade | None:
    spec = task.grading
    if not (spec.test_setup or spec.report_path):
        return None
    done = await sandbox.run(
        [*_shell(_SET_UP), spec.report_path],
        cwd=task.workdir,
        timeout_s=_TIMEOUT_S,
        stdin=spec.test_setup.encode(),
    )
    if done.exit_code:
        reason = f"the tests cannot be set up (exit code {done.exit_code})"
        return Grade(Verdict.INVALID, reason=reason, log=done.text)
    if spec.test_setup:
        # It may take the tests from the solution's commit, which goes before they run.
        try:
            await hide_future(sandbox, task, stage=Stage.TESTS)
        except BrokenImageError as error:
            reason = f"the set-up of the tests broke the repository: {error}"
            return Grade(Verdict.INVALID, reason=reason, log=done.text)
    return None


def _shell(script: str) -> list[str]:
    return ["bash", "-c", _GIT + script, "prepare"]
