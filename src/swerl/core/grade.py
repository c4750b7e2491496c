"""Grade: facts from running a Task's tests on a patch in a fresh Sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """What an Episode came to."""

    SOLVED = "solved"
    """Every declared test has the status it must have."""
    UNSOLVED = "unsolved"
    """The tests ran and at least one declared test says no, or there was nothing to grade."""
    INFRA = "infra"
    """The machinery failed; says nothing about the policy and never enters a statistic."""
    TIMEOUT = "timeout"
    """A declared budget ran out; a named reward rule decides what it is worth."""
    CHEAT = "cheat"
    """The patch tried to forge its grade."""
    INVALID = "invalid"
    """The Task itself is broken; never enters a statistic."""


LEARNABLE = frozenset({Verdict.SOLVED, Verdict.UNSOLVED, Verdict.TIMEOUT, Verdict.CHEAT})
"""Verdicts that say something about the policy."""


class TestStatus(StrEnum):
    """Status of one test as its runner reports it."""

    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAIL = "xfail"
    XPASS = "xpass"
    MISSING = "missing"
    """Declared, but absent from the report."""

    @property
    def is_good(self) -> bool:
        """Whether a test of this status holds nothing against a patch."""
        return self in (TestStatus.PASSED, TestStatus.XFAIL, TestStatus.SKIPPED)


class Canary(StrEnum):
    """What became of the tests that were put among the hidden ones in order to fail."""

    NONE = "none"
    """None was put in: no test file that it could stand in, or a command that picks its tests."""
    FAILED = "failed"
    """All failed, as they must."""
    MISSING = "missing"
    """At least one is not in the report."""
    PASSED = "passed"
    """At least one is reported as passed: forged, if no declared test failed."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The facts of one grading and the Verdict drawn from them."""

    verdict: Verdict
    reason: str = ""
    """One line that a person reads first."""
    tests: Mapping[str, TestStatus] = field(default_factory=dict)
    """Status per declared test id."""
    restored: tuple[str, ...] = ()
    """Paths in which the patch touched tests or their configuration and was overruled."""
    canary: Canary = Canary.NONE
    """Whether the report could still say "failed"."""
    durations: Mapping[str, float] = field(default_factory=dict)
    """Seconds per test id, where the test runner tells them."""
    duration_s: float = 0.0
    """Seconds of the whole grading."""
    test_s: float = 0.0
    """Seconds of the test command alone."""
    log: str = ""
    """What the test command printed, capped."""
