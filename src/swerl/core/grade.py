"""Grade: facts from running a Task's tests on a patch in a fresh Sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """Result of an Episode."""

    SOLVED = "solved"
    """Every declared test has the status it must have."""
    UNSOLVED = "unsolved"
    """The tests ran and at least one declared test failed, or there was nothing to grade."""
    INFRA = "infra"
    """The infrastructure failed; this is no result of the policy and never enters a statistic."""
    TIMEOUT = "timeout"
    """A declared budget ran out; a named reward rule gives its reward."""
    CHEAT = "cheat"
    """The patch tried to forge its grade."""
    INVALID = "invalid"
    """The Task itself is broken; never enters a statistic."""


LEARNABLE = frozenset({Verdict.SOLVED, Verdict.UNSOLVED, Verdict.TIMEOUT, Verdict.CHEAT})
"""Verdicts that are results of the policy."""


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
    def passes(self) -> bool:
        """True if the test ran with the expected result, as a test that a patch fixes must."""
        return self in (TestStatus.PASSED, TestStatus.XFAIL)

    @property
    def is_good(self) -> bool:
        """True if it is no reason against a patch: it passes, or was skipped."""
        return self.passes or self is TestStatus.SKIPPED

    @property
    def fails(self) -> bool:
        """True for both kinds of failure."""
        return self in (TestStatus.FAILED, TestStatus.ERROR)


class Confirmation(StrEnum):
    """Result of the further runs with mutated tests that confirm a solved patch."""

    NONE = "none"
    """No such run: the first one was not solved, no test can be mutated, or no audit was due."""
    REAL = "real"
    """Each run failed as it does with the known solution."""
    FORGED = "forged"
    """A test passed although its expected value was mutated."""
    UNSTEADY = "unsteady"
    """A test failed without being mutated, though it passed in the first run."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The facts of one grading and the Verdict drawn from them."""

    verdict: Verdict
    reason: str = ""
    """One line for people."""
    tests: Mapping[str, TestStatus] = field(default_factory=dict)
    """Status per declared test id."""
    restored: tuple[str, ...] = ()
    """Paths of tests or test configuration in the patch that were restored."""
    confirmation: Confirmation = Confirmation.NONE
    flags: tuple[str, ...] = ()
    """Reasons to audit the patch, by the names of their patterns."""
    duration_s: float = 0.0
    """Seconds of the whole grading."""
    test_s: float = 0.0
    """Seconds of the test command in its first run."""
    log: str = ""
    """Output of the test command, capped."""
