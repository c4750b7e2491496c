"""Hide a repository's future from an agent: later git history, solutions and hidden tests.

The shell script beside this file runs in the sandbox. It replaces the repository by a new one that
gets only the base commit and its past, removes other copies of the project, and files that are
known to reveal the solution. `swerl tasks vet` scans for what remains.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swerl.core.changes import edits, touched
from swerl.core.contracts import Sandbox
from swerl.core.errors import BrokenImageError, SandboxError
from swerl.core.sandbox import Exec
from swerl.core.task import Task

MAX_OBJECTS = 50_000
"""Maximum objects of a store that keeps its past: about 0.3 s of work."""
MAX_KIB = 128 * 2**10
"""Maximum KiB of a store that keeps its past, which is copied into the sandbox's layer."""
SCRIPT = Path(__file__).with_suffix(".sh")
_TIMEOUT_S = 600.0
_BROKEN = 93
_MIN_BLOB_BYTES = 32
"""Smaller files, such as empty ones, do not prove that the past has a solution."""


class Stage(StrEnum):
    """Moment in the life of a sandbox, which decides what may be removed."""

    AGENT = "agent"
    """Before an agent starts: everything."""
    GRADING = "grading"
    """In a sandbox for grading, before the patch: everything except the files that grading reads,
    and except repositories if the Task has a `test_setup`, which may need them."""
    TESTS = "tests"
    """After the `test_setup`: the futures of repositories."""


@dataclass(frozen=True, slots=True)
class HiddenFuture:
    """Result of hiding the future in one sandbox."""

    base: str
    """Commit of HEAD; empty without a repository or without a commit."""
    history: str = ""
    """`full`, or `none` if only the base commit is left, as in a clone of depth 1."""
    removed: tuple[str, ...] = ()
    """Removed files and folders outside git's folder."""
    duration_s: float = 0.0


async def hide_future(sandbox: Sandbox, task: Task, *, stage: Stage = Stage.AGENT) -> HiddenFuture:
    """Remove everything from a sandbox that reveals the solution or the tests.

    HEAD becomes the base commit with its own id; the files of the work tree are unchanged, and what
    was staged is not staged any more. The base is the Task's if HEAD descends from it, else HEAD.
    Raises BrokenImageError on a repository that git cannot read, SandboxError if the sandbox cannot
    be changed.
    """
    started = time.monotonic()
    waits = stage is Stage.GRADING and task.grading.test_setup
    part = "repository" if stage is Stage.TESTS else "files" if waits else "all"
    settings = [task.workdir, task.base_commit, str(MAX_OBJECTS), str(MAX_KIB), part]
    solved = await _solved_ids(sandbox, task, stage)
    argv = ["sh", "-c", _script(), "hide_future", *settings]
    stdin = "".join(_script_input(task, solved, stage)).encode("utf-8", "surrogateescape")
    values: dict[str, str] = {}
    removed: list[str] = []
    denied: set[str] | None = None
    # Root may lack the right to change files of the ordinary user, and the other way round.
    for user in (None, "root"):
        result = await sandbox.run(argv, cwd="/", user=user, timeout_s=_TIMEOUT_S, stdin=stdin)
        if result.exit_code or result.truncated:
            raise _failure(task, result)
        lines = result.stdout.decode("utf-8", "replace").splitlines()
        pairs = [(kind, value) for kind, _, value in (line.partition(" ") for line in lines)]
        values |= dict(pairs)
        removed += [value for kind, value in pairs if kind == "removed"]
        paths = {value for kind, value in pairs if kind == "denied"}
        denied = paths if denied is None else denied & paths
        if not denied:
            seconds = time.monotonic() - started
            base, history = values.get("base", ""), values.get("history", "")
            return HiddenFuture(base, history, tuple(removed), seconds)
    raise SandboxError(
        f"cannot hide the future of {task.image}: no user of the sandbox can change "
        f"{', '.join(sorted(denied or ())[:3])}",
        hint="`swerl tasks vet` reports what the image reveals",
    )


def _failure(task: Task, result: Exec) -> BrokenImageError | SandboxError:
    message = result.stderr.decode("utf-8", "replace").strip()[-300:]
    if result.exit_code == _BROKEN:
        message = f"the repository of {task.image} cannot be used: {message}"
        return BrokenImageError(message, hint="build or pull the image again")
    reason = f"it ran past {_TIMEOUT_S:g} s" if result.timed_out else message or "no message"
    return SandboxError(
        f"cannot hide the future of {task.image}: {reason} (exit code {result.exit_code})",
        hint="`swerl tasks vet` reports what the image reveals",
    )


def _script_input(task: Task, solved: Sequence[str], stage: Stage) -> list[str]:
    hidden_tests = dict.fromkeys((*task.grading.test_files, *touched(task.grading.test_patch)))
    is_read = _read_by_grading(task) if stage is Stage.GRADING else lambda _: False
    return [
        *(f"outside {pattern}\n" for pattern in OUTSIDE.split() if not is_read(pattern)),
        *(f"inside {pattern}\n" for pattern in INSIDE.split() if not is_read(pattern)),
        *(f"file {path}\n" for path in to_remove(task) if not is_read(path)),
        *(f"test {path}\n" for path in hidden_tests if _is_plain(path)),
        *(f"solved {blob}\n" for blob in solved),
    ]


def to_remove(task: Task) -> list[str]:
    """Return the files that vetting found to reveal the solution, from the Task's Certificate."""
    removed = task.certificate.get("removed")
    paths = removed if isinstance(removed, list) else []
    return [path for path in map(str, paths) if path.startswith("/") and "\n" not in path]


def _read_by_grading(task: Task) -> Callable[[str], bool]:
    """Return a test for a pattern of files that the grading of a Task reads."""
    spec = task.grading
    commands = "\n".join((spec.test_setup, spec.test_command, spec.report_command))
    brought = "\n".join((*spec.files, spec.report_path))

    def is_read(pattern: str) -> bool:
        # A script may run the next one, and none of them holds a solution.
        if pattern.endswith((".sh", "/parser.py")) or pattern == "parser.py":
            return True
        if pattern.endswith(("/pip", "/uv")):
            return bool(re.search(rf"\b{pattern.rpartition('/')[2]}\b", commands))
        words = re.escape(pattern).replace(r"\*", r"[^/\s]*")
        # Files in the repository are written again if the Task brings them.
        text = f"{commands}\n{brought}" if pattern.startswith("/") else commands
        is_brought = any(path.startswith(f"{pattern}/") for path in spec.test_files)
        return not is_brought and bool(re.search(rf"(?<![\w./-]){words}(?![\w-])", text))

    return is_read


def _is_plain(path: str) -> bool:
    """Return True if a path stays inside the workdir and has no line break."""
    clean = posixpath.normpath(path)
    return "\n" not in path and not clean.startswith(("/", "../")) and clean not in (".", "..")


@functools.cache
def _script() -> str:
    return SCRIPT.read_text()


async def _solved_ids(sandbox: Sandbox, task: Task, stage: Stage) -> list[str]:
    """Return the object ids of the files after the solution and after the hidden tests.

    They are computed outside, so no part of the solution enters the sandbox.
    """
    base = (task.base_commit or "HEAD") if stage is Stage.TESTS else ""
    texts = await solved_texts(sandbox, task, base=base)
    blobs = [text.encode("utf-8", "surrogateescape") for text in texts.values()]
    return [name for blob in blobs if len(blob) >= _MIN_BLOB_BYTES for name in object_names(blob)]


async def solved_texts(sandbox: Sandbox, task: Task, *, base: str = "") -> Mapping[str, str]:
    """Return the files by path as the solution and the hidden tests leave them.

    The files before are read from the work tree, or from the commit `base`.
    """
    texts = dict(task.grading.test_files)
    for patch in (task.gold_patch, task.grading.test_patch):
        texts |= await _patched(sandbox, task.workdir, base, patch)
    return texts


async def _patched(sandbox: Sandbox, workdir: str, base: str, patch: str) -> Mapping[str, str]:
    """Return the files of a patch with its edits applied, without files that do not match."""
    texts: dict[str, str] = {}
    mismatched: set[str] = set()
    for edit in edits(patch):
        if edit.path not in texts:
            texts[edit.path] = await _read(sandbox, workdir, base, edit.path)
        before = texts[edit.path]
        if edit.old not in before or (not edit.old and before):
            mismatched.add(edit.path)
        texts[edit.path] = before.replace(edit.old, edit.new, 1) if edit.old else edit.new
    return {path: text for path, text in texts.items() if path not in mismatched}


async def _read(sandbox: Sandbox, workdir: str, base: str, path: str) -> str:
    if base:
        argv = ["git", "-c", "safe.directory=*", "cat-file", "-p", f"{base}:./{path}"]
        shown = await sandbox.run(argv, cwd=workdir, timeout_s=_TIMEOUT_S)
        return "" if shown.exit_code else shown.stdout.decode("utf-8", "surrogateescape")
    try:
        return (await sandbox.read(f"{workdir}/{path}")).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def object_names(blob: bytes) -> Sequence[str]:
    """Return the blob's object id in SHA-1 and in SHA-256 repositories."""
    data = b"blob %d\0" % len(blob) + blob
    return hashlib.sha1(data, usedforsecurity=False).hexdigest(), hashlib.sha256(data).hexdigest()


OUTSIDE = """
/r2e_tests /run_tests.sh /expected_test_output.json /execution_result.json /parsed_commit.json
/syn_issue.json /root/r2e_tests /root/run_tests.sh /home/*/r2e_tests /home/*/run_tests.sh
/home/*.patch /home/run.sh /home/*-run.sh /home/prepare.sh
/eval.sh /root/eval.sh /tmp/*.patch /tmp/*.diff /root/*.patch /root/*.diff
/workspace/*.patch /workspace/*.diff /workspace/run_script.sh /workspace/parser.py
/workspace/output.json /before.sh /before_repo_set_cmd* /run_script.sh /parser.py
/solution /oracle /verifier /tests /logs/verifier /logs/agent
/*.patch /*.diff /reward* /gold*
/root/.git-credentials /root/.netrc /home/*/.git-credentials /home/*/.netrc
/root/.config/git/credentials /home/*/.config/git/credentials
/root/.*_history /home/*/.*_history /root/.viminfo /home/*/.viminfo
/root/.cache/pip /root/.cache/uv /home/*/.cache/pip /home/*/.cache/uv
/opt/*conda*/pkgs/*.conda /opt/*conda*/pkgs/*.tar.bz2
"""
"""Absolute shell patterns of files that reveal a solution; `*` matches no slash. By line: R2E-Gym
(2), Multi-SWE-bench, SWE-bench, SWE-bench Pro (2), Harbor, others, credentials (2), histories,
caches."""
INSIDE = """
r2e_tests run_tests.sh expected_test_output.json execution_result.json parsed_commit.json
syn_issue.json modified_files.json modified_entities.json
before.sh run_script.sh parser.py
test_fail_to_pass.py verifier oracle.patch reward.txt reward.json
fix.patch test.patch gold.patch model.patch solution.patch fix.diff
"""
"""Such patterns relative to the repository; files of the base commit stay. By line: R2E-Gym (2),
SWE-bench Pro, Scale-SWE and Harbor, others."""
