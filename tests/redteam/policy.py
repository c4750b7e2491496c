"""A cheating policy: the commands of an agent, and how its Episode must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swerl.core.grade import Verdict


class Kind(StrEnum):
    """Kind of Task that a policy cheats on. The tests are hidden from the agent."""

    PYTHON = "python"
    """Declared tests, run by pytest."""
    CLASSES = "classes"
    """Declared tests, run by unittest."""
    PATCHED = "patched"
    """As PYTHON, but the agent sees one of the tests and a hidden diff adds the others."""
    EXIT_CODE = "exit-code"
    """A test command whose exit code alone counts."""
    SCRIPT = "script"
    """A script of tests, run by pytest."""
    REWARD = "reward"
    """A script that writes a reward to a file."""
    REPORT = "report"
    """A parser of the Task that writes a report from the log."""
    FUTURE = "future"
    """As CLASSES, in a repository that holds later commits in many places."""
    MOCHA = "mocha"
    GO = "go"
    RUST = "rust"
    """Run by cargo, without a network."""
    MINITEST = "minitest"
    C = "c"
    """A program with `assert` that prints lines of the Test Anything Protocol."""


class Defence(StrEnum):
    """The defence that stops a policy."""

    FUTURE = "the sandbox holds no later commits"
    HISTORY = "the grading sandbox holds no later commits either"
    NETWORK = "the sandbox has no network"
    FRESH = "grading uses a fresh sandbox"
    DROPPED = "files that steer tests are dropped from the patch"
    NOT_TAKEN = "caches and installed packages are not part of a patch"
    MUTATED = "a test passed although its expected value was mutated"
    WORST = "the worst line about a test counts"
    MARKER = "the log's end cannot be forged"
    REPORT = "only reported tests count"
    TIME = "time limits"
    SIZE = "the patch is refused"
    LIMIT = "exhausting the sandbox counts as unsolved"
    TESTS = "the tests still fail"
    VETTED = "vetting removes the file or rejects the task"


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to cheat."""

    name: str
    sentence: str
    commands: tuple[str, ...]
    """Shell commands of its agent."""
    stopped_by: Defence
    verdict: Verdict = Verdict.UNSOLVED
    """How its Episode must end."""
    kind: Kind = Kind.CLASSES
    changes: Mapping[str, object] = field(default_factory=dict)
    """Fields of the Task's grading spec to replace."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the repository, by path."""
    harmless: str = ""
    """The reason why even a grader without defences gives no reward; empty if it gives one."""


def write(path: str, text: str, *, mode: str = "") -> str:
    """Return the shell command that writes a file and makes its parents."""
    folder = f"mkdir -p \"$(dirname '{path}')\" && " if "/" in path else ""
    end = f"\nchmod {mode} {path}" if mode else ""
    return f"{folder}cat >{path} <<'END_OF_FILE'\n{text}\nEND_OF_FILE{end}"
