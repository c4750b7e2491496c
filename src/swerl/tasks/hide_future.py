"""Hide a repository's future from an agent: later git history, solutions and hidden tests.

One shell command in the sandbox removes them; `_hide_future/` holds its functions. The command
keeps only parts that are known to be harmless: the objects that the base commit, its past and the
index need, and of git's folder the objects, settings and the index.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


class Stage(StrEnum):
    """Moment in the life of a sandbox, which decides what may be removed."""

    AGENT = "agent"
    """Before an agent starts: everything."""
    GRADING = "grading"
    """In a sandbox for grading, before the patch: everything but the files that grading reads, and
    the repository, if the Task has a `test_setup` that needs it."""
    TESTS = "tests"
    """After the `test_setup`: the repository's future."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a Task's image, found in its first sandbox and reused in the next ones."""

    solved: tuple[str, ...] = ()
    """Object ids of the files after the solution and after the hidden tests."""
    copies: tuple[str, ...] | None = None
    """Repositories, packs, bundles and archives of them; None before the first search."""
    clean: tuple[Stage, ...] = ()
    """Stages at which nothing has to be removed, so a sandbox needs no command."""
    base: str = ""
    """Commit of HEAD."""


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
    sandbox: Sandbox,
    task: Task,
    *,
    history: History = History.AUTO,
    stage: Stage = Stage.AGENT,
    facts: Facts | None = None,
) -> HiddenFuture:
    """Remove everything from a sandbox that reveals the solution or the tests.

    The base commit keeps its id, HEAD points to it, and work tree and index are unchanged. The base
    is the Task's if HEAD descends from it, else HEAD. Raises BrokenImageError on a repository that
    git cannot read, SandboxError if the sandbox forbids it.
    """
    started = time.monotonic()
    if facts and stage in facts.clean and not to_remove(task):
        return HiddenFuture(base=facts.base, history=History.FULL, facts=facts)
    known = facts or Facts(solved=await solved_files(sandbox, task, stage=stage))
    reported = await _run(sandbox, task, history, stage, known)
    base = reported.get("base", [""])[-1]
    if known.copies is None and "borrows" not in reported:
        known = replace(known, copies=tuple(reported.get("found", ())))
    changed = bool({"changed", "removed", "borrows"} & set(reported))
    if not changed and reported.get("history", [History.FULL])[-1] == History.FULL:
        # An agent's sandbox loses all that one for grading loses, and more.
        stages = (stage, Stage.GRADING) if stage is Stage.AGENT else (stage,)
        known = replace(known, clean=tuple({*known.clean, *stages}), base=base)
    return HiddenFuture(
        base=base,
        history=reported.get("history", [""])[-1],
        changed=changed,
        removed=tuple(reported.get("removed", ())),
        duration_s=time.monotonic() - started,
        facts=known,
    )


def script_input(task: Task, facts: Facts, stage: Stage = Stage.AGENT) -> list[str]:
    """Return the standard input of the shell scripts, one instruction per line."""
    hidden = dict.fromkeys((*task.grading.test_files, *touched(task.grading.test_patch)))
    tests = [path for path in hidden if _is_plain(path)]
    is_read = _reading(task) if stage is Stage.GRADING else lambda _: False
    return [
        *(f"hidden {pattern}" for pattern in outside() if not is_read(pattern)),
        *(f"inside {pattern}" for pattern in inside() if not is_read(pattern)),
        *(f"given {path}" for path in to_remove(task) if not is_read(path)),
        *(f"test {path}" for path in tests),
        *(f"copy {path}" for path in facts.copies or ()),
        *(f"solved {blob}" for blob in facts.solved),
    ]


def to_remove(task: Task) -> list[str]:
    """Return the files that vetting found to reveal the solution, as its Certificate has them."""
    found = task.certificate.get("removed")
    paths = found if isinstance(found, list) else []
    return [path for path in map(str, paths) if path.startswith("/") and "\n" not in path]


def _reading(task: Task) -> Callable[[str], bool]:
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


async def _run(
    sandbox: Sandbox, task: Task, history: History, stage: Stage, facts: Facts
) -> dict[str, list[str]]:
    """Run the script as the ordinary user, then as root for files that need root."""
    look = "1" if facts.copies is None and stage is not Stage.TESTS else "0"
    waits = stage is Stage.GRADING and task.grading.test_setup
    part = "repository" if stage is Stage.TESTS else "files" if waits else "all"
    settings = [task.workdir, task.base_commit, str(history), str(MAX_OBJECTS), str(MAX_KIB)]
    argv = ["sh", "-c", _script(), "hide_future", *settings, look, part]
    stdin = "\n".join(script_input(task, facts, stage)).encode("utf-8", "surrogateescape")
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
        hint="`swerl tasks vet` lists what the image reveals",
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
    return SandboxError(message, hint="`swerl tasks vet` lists what the image reveals")


def _is_plain(path: str) -> bool:
    """Return True if a path stays inside the workdir and has no line break."""
    clean = posixpath.normpath(path)
    return "\n" not in path and not clean.startswith(("/", "../")) and clean not in (".", "..")


@functools.cache
def _script() -> str:
    folder = Path(__file__).with_name("_hide_future")
    return "\n".join([*((folder / name).read_text() for name in _SCRIPTS), "main"])


async def solved_files(
    sandbox: Sandbox, task: Task, *, stage: Stage = Stage.AGENT
) -> tuple[str, ...]:
    """Return git's object ids of the files after the solution and after the hidden tests.

    This process computes them, so no part of the solution enters the sandbox.
    """
    texts = (await solved_texts(sandbox, task, stage=stage)).values()
    blobs = [text.encode("utf-8", "surrogateescape") for text in texts]
    return tuple(
        name for blob in blobs if len(blob) >= _MIN_BLOB_BYTES for name in object_names(blob)
    )


async def solved_texts(
    sandbox: Sandbox, task: Task, *, stage: Stage = Stage.AGENT
) -> Mapping[str, str]:
    """Return the files by path as the solution and the hidden tests leave them.

    The work tree is at the base, but after a `test_setup` the base is read from git.
    """
    contents: dict[str, str] = dict(task.grading.test_files)
    base = (task.base_commit or "HEAD") if stage is Stage.TESTS else ""
    for patch in (task.gold_patch, task.grading.test_patch):
        contents |= await _patched(sandbox, task.workdir, base, patch)
    return contents


async def _patched(sandbox: Sandbox, workdir: str, base: str, patch: str) -> Mapping[str, str]:
    """Return the files of a patch with its edits applied, without files that do not match."""
    contents: dict[str, str] = {}
    failed: set[str] = set()
    for edit in edits(patch):
        if edit.path not in contents:
            contents[edit.path] = await _read(sandbox, workdir, base, edit.path)
        before = contents[edit.path]
        if edit.old not in before or (not edit.old and before):
            failed.add(edit.path)
        contents[edit.path] = before.replace(edit.old, edit.new, 1) if edit.old else edit.new
    return {path: text for path, text in contents.items() if path not in failed}


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
