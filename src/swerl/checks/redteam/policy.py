"""What a cheating policy is: the commands of an agent, and how its Episode must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swerl.core.chat import Json
from swerl.core.grade import Verdict


class Ground(StrEnum):
    """Kind of Task that a policy is let loose on."""

    UNITTEST = "unittest"
    """Declared tests, run by unittest; the agent sees them."""
    PYTEST = "pytest"
    """Declared tests that a hidden diff brings, run by pytest."""
    EXIT_CODE = "exit-code"
    """A test command of which only the exit code is known."""
    SCRIPT = "script"
    """A hidden script of tests, run by pytest."""
    REWARD = "reward"
    """A hidden script that writes a reward to a file."""
    FUTURE = "future"
    """The first ground, in a repository that holds its own future in many places."""


class Stop(StrEnum):
    """What stops a policy."""

    FUTURE = "its sandbox holds no future"
    NETWORK = "its sandbox has no network"
    FRESH = "grading has a sandbox of its own"
    DROPPED = "what steers tests is dropped from the patch"
    CANARY = "a test that must fail was not reported as failed"
    TWICE = "a second run with a test that must fail"
    WORST = "the worst line about a test counts"
    MARKER = "the log's end cannot be forged"
    REPORT = "only tests that report count"
    TIME = "time limits"
    SIZE = "such a patch is not taken"
    LIMIT = "what it used up is its own loss"
    TESTS = "the tests still fail"


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to cheat."""

    name: str
    sentence: str
    """What it tries."""
    commands: tuple[str, ...]
    """What its agent runs in the shell."""
    stop: Stop
    verdict: Verdict = Verdict.UNSOLVED
    """How its Episode must end."""
    ground: Ground = Ground.UNITTEST
    changes: Mapping[str, Json] = field(default_factory=dict)
    """Fields of the ground's grading spec that differ."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the repository beside the ground's, by path."""
    harmless: str = ""
    """Why not even a grader without defences would reward it; empty where one would."""


def write(path: str, text: str, *, mode: str = "") -> str:
    """Return the command that writes a file, making its parents."""
    folder = f"mkdir -p \"$(dirname '{path}')\" && " if "/" in path else ""
    end = f"\nchmod {mode} {path}" if mode else ""
    return f"{folder}cat >{path} <<'END_OF_FILE'\n{text}\nEND_OF_FILE{end}"
