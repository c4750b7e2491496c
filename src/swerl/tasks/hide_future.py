"""Hide a repository's future from an agent: later git history, solutions and hidden tests.

One shell command in the sandbox removes them; `_hide_future/` holds its functions. The command
keeps only parts that are known to be harmless: the objects that the base commit, its past and the
index need, and of git's folder the objects, settings and the index.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from swerl.core.contracts import Sandbox
from swerl.core.errors import BrokenImageError, SandboxError
from swerl.core.patch import edits, touched
from swerl.core.sandbox import Exec
from swerl.core.task import Task

MAX_OBJECTS = 50_000
"""Maximum objects of a store that keeps its past: about 0.3 s of work."""
MAX_KIB = 128 * 2**10
"""Maximum KiB of a store that keeps its past, which is copied into the sandbox's layer."""
_TIMEOUT_S = 600.0
_SCRIPTS = ("common.sh", "main.sh", "repository.sh", "objects.sh", "files.sh", "copies.sh")
_BROKEN, _FOREIGN = 93, 94
_MIN_BLOB_BYTES = 32
"""Smaller files, such as empty ones, do not prove that the past has a solution."""


class History(StrEnum):
    """History that an agent sees."""

    AUTO = "auto"
    """`full` if the object store is within MAX_OBJECTS and MAX_KIB, else `none`."""
    FULL = "full"
    """Every ancestor of the base commit."""
    NONE = "none"
    """Only the base commit, as in a clone of depth 1."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a Task's image, found in its first sandbox and reused in the next ones."""

    solved: tuple[str, ...] = ()
    """Object ids of the files after the solution and after the hidden tests."""
    copies: tuple[str, ...] | None = None
    """Repositories and bundles outside the workdir; None before the first search."""


@dataclass(frozen=True, slots=True)
class HiddenFuture:
    """Result of hiding the future in one sandbox."""

    base: str
    """Commit of HEAD; empty without a repository or without a commit."""
    history: str = ""
    """`full` or `none`."""
    changed: bool = False
    """True if anything was removed or changed."""
    removed: tuple[str, ...] = ()
    """Removed files and folders outside git's folder."""
    duration_s: float = 0.0
    facts: Facts = field(default_factory=Facts)
    """Facts for the next sandbox of the same Task."""


async def hide_future(
    sandbox: Sandbox, task: Task, *, history: History = History.AUTO, facts: Facts | None = None
) -> HiddenFuture:
    """Remove everything from an agent's sandbox that reveals the solution or the tests.

    The base commit keeps its id, HEAD points to it, and work tree and index are unchanged. The base
    is the Task's if HEAD descends from it, else HEAD. Raises BrokenImageError on a repository that
    git cannot read, SandboxError if the sandbox forbids it.
    """
    started = time.monotonic()
    known = facts or Facts(solved=await _solved(sandbox, task))
    reported = await _run(sandbox, task, history, known)
    if known.copies is None:
        known = replace(known, copies=tuple(reported.get("found", ())))
    return HiddenFuture(
        base=reported.get("base", [""])[-1],
        history=reported.get("history", [""])[-1],
        changed="changed" in reported or "removed" in reported,
        removed=tuple(reported.get("removed", ())),
        duration_s=time.monotonic() - started,
        facts=known,
    )


def script_input(task: Task, facts: Facts) -> list[str]:
    """Return the standard input of the shell scripts, one instruction per line."""
    hidden = dict.fromkeys((*task.grading.test_files, *touched(task.grading.test_patch)))
    tests = [path for path in hidden if _is_plain(path)]
    return [
        *(f"hidden {pattern}" for pattern in outside()),
        *(f"inside {pattern}" for pattern in inside()),
        *(f"test {path}" for path in tests),
        *(f"copy {path}" for path in facts.copies or ()),
        *(f"solved {blob}" for blob in facts.solved),
    ]


async def _run(
    sandbox: Sandbox, task: Task, history: History, facts: Facts
) -> dict[str, list[str]]:
    """Run the script as the ordinary user, then as root for files that need root."""
    look = "1" if facts.copies is None else "0"
    settings = [task.workdir, task.base_commit, str(history), str(MAX_OBJECTS), str(MAX_KIB)]
    argv = ["sh", "-c", _script(), "hide_future", *settings, look]
    stdin = "\n".join(script_input(task, facts)).encode("utf-8", "surrogateescape")
    reported: dict[str, list[str]] = {}
    denied: set[str] | None = None
    for user in (None, "root"):
        done = await sandbox.run(argv, cwd="/", user=user, timeout_s=_TIMEOUT_S, stdin=stdin)
        if done.truncated or done.exit_code not in (0, _FOREIGN):
            raise _failure(task, done)
        own: set[str] = set()
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            kind, _, value = line.partition(" ")
            own |= {value} if kind == "denied" else set()
            reported.setdefault(kind, []).append(value)
        if done.exit_code == 0:
            denied = own if denied is None else denied & own
        if denied is not None and not denied:
            return reported
    names = ", ".join(sorted(denied or ())[:3]) or done.stderr.decode("utf-8", "replace").strip()
    raise SandboxError(
        f"cannot hide the future of {task.image}: no user of the sandbox can change {names}",
        hint="`swerl tasks scan-leaks` lists what the image reveals",
    )


def _failure(task: Task, done: Exec) -> BrokenImageError | SandboxError:
    stderr = done.stderr.decode("utf-8", "replace").strip()[-300:]
    if done.exit_code == _BROKEN:
        message = f"the repository of {task.image} cannot be used: {stderr}"
        return BrokenImageError(message, hint="build or pull the image again")
    reason = (
        f"{_TIMEOUT_S:g} s passed without an end"
        if done.timed_out
        else stderr or f"exit code {done.exit_code}"
    )
    message = f"cannot hide the future of {task.image}: {reason}"
    return SandboxError(message, hint="`swerl tasks scan-leaks` lists what the image reveals")


def _is_plain(path: str) -> bool:
    """Return True if a path stays inside the workdir and has no line break."""
    clean = posixpath.normpath(path)
    return "\n" not in path and not clean.startswith(("/", "../")) and clean not in (".", "..")


@functools.cache
def _script() -> str:
    folder = Path(__file__).with_name("_hide_future")
    return "\n".join([*((folder / name).read_text() for name in _SCRIPTS), "main"])


async def _solved(sandbox: Sandbox, task: Task) -> tuple[str, ...]:
    """Return git's object ids of the files after the solution and after the hidden tests.

    This process computes them, so no part of the solution enters the sandbox.
    """
    contents: dict[str, str] = dict(task.grading.test_files)
    for patch in (task.gold_patch, task.grading.test_patch):
        contents |= await _patched(sandbox, task.workdir, patch)
    blobs = [text.encode("utf-8", "surrogateescape") for text in contents.values()]
    return tuple(
        name for blob in blobs if len(blob) >= _MIN_BLOB_BYTES for name in _object_names(blob)
    )


async def _patched(sandbox: Sandbox, workdir: str, patch: str) -> Mapping[str, str]:
    """Return the files of a patch with its edits applied, without files that do not match."""
    contents: dict[str, str] = {}
    failed: set[str] = set()
    for edit in edits(patch):
        if edit.path not in contents:
            contents[edit.path] = await _read(sandbox, f"{workdir}/{edit.path}")
        before = contents[edit.path]
        if edit.old not in before or (not edit.old and before):
            failed.add(edit.path)
        contents[edit.path] = before.replace(edit.old, edit.new, 1) if edit.old else edit.new
    return {path: text for path, text in contents.items() if path not in failed}


async def _read(sandbox: Sandbox, path: str) -> str:
    try:
        return (await sandbox.read(path)).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def _object_names(blob: bytes) -> Sequence[str]:
    """Return the blob's object id in SHA-1 and in SHA-256 repositories."""
    data = b"blob %d\0" % len(blob) + blob
    return hashlib.sha1(data, usedforsecurity=False).hexdigest(), hashlib.sha256(data).hexdigest()


OUTSIDE: Mapping[str, tuple[str, ...]] = {
    "r2e-gym": (
        "/r2e_tests",
        "/run_tests.sh",
        "/expected_test_output.json",
        "/execution_result.json",
        "/parsed_commit.json",
        "/syn_issue.json",
        "/root/r2e_tests",
        "/root/run_tests.sh",
        "/home/*/r2e_tests",
        "/home/*/run_tests.sh",
    ),
    "multi-swe-bench": (
        "/home/*.patch",
        "/home/run.sh",
        "/home/*-run.sh",
        "/home/prepare.sh",
    ),
    "swe-bench": (
        "/eval.sh",
        "/root/eval.sh",
        "/tmp/*.patch",
        "/tmp/*.diff",
        "/root/*.patch",
        "/root/*.diff",
    ),
    "swe-bench-pro": (
        "/workspace/*.patch",
        "/workspace/*.diff",
        "/workspace/run_script.sh",
        "/workspace/parser.py",
        "/workspace/output.json",
        "/before.sh",
        "/before_repo_set_cmd*",
        "/run_script.sh",
        "/parser.py",
    ),
    "harbor": (
        "/solution",
        "/oracle",
        "/verifier",
        "/tests",
        "/logs/verifier",
        "/logs/agent",
    ),
    "any": (
        "/*.patch",
        "/*.diff",
        "/reward*",
        "/gold*",
        "/root/.git-credentials",
        "/root/.netrc",
        "/home/*/.git-credentials",
        "/home/*/.netrc",
        "/root/.config/git/credentials",
        "/home/*/.config/git/credentials",
    ),
    "image authors": (
        "/root/.*_history",
        "/home/*/.*_history",
        "/root/.viminfo",
        "/home/*/.viminfo",
    ),
    "package caches": (
        "/root/.cache/pip",
        "/root/.cache/uv",
        "/home/*/.cache/pip",
        "/home/*/.cache/uv",
        "/opt/*conda*/pkgs/*.conda",
        "/opt/*conda*/pkgs/*.tar.bz2",
    ),
}
"""Absolute shell patterns by the dataset whose images have such files; `*` matches no slash."""

INSIDE: Mapping[str, tuple[str, ...]] = {
    "r2e-gym": (
        "r2e_tests",
        "run_tests.sh",
        "expected_test_output.json",
        "execution_result.json",
        "parsed_commit.json",
        "syn_issue.json",
        "modified_files.json",
        "modified_entities.json",
    ),
    "swe-bench-pro": ("before.sh", "run_script.sh", "parser.py"),
    "scale-swe": ("test_fail_to_pass.py",),
    "harbor": ("verifier", "oracle.patch", "reward.txt", "reward.json"),
    "any": ("fix.patch", "test.patch", "gold.patch", "model.patch", "solution.patch", "fix.diff"),
}
"""Shell patterns relative to the repository. Files of the base commit stay."""


def outside() -> list[str]:
    return [pattern for patterns in OUTSIDE.values() for pattern in patterns]


def inside() -> list[str]:
    return [pattern for patterns in INSIDE.values() for pattern in patterns]
