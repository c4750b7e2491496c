"""Certificate: the result of vetting a Task, tied to the Task's row by a digest.

The row stores the Certificate. It includes the decisions of vetting (time limit of the grader,
mutated tests, dropped tests), so that Task and Certificate give the certified Task. The digest
covers every field that decides how an agent is prompted or graded, but not the dataset's own facts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from swerl.core.chat import Json
from swerl.core.task import MutatedTests, Strength, Task, to_row

_DIGEST_CHARS = 32


class Defect(StrEnum):
    """Reason why a Task is not admitted."""

    NO_SOLUTION = "no solution"
    """It has no known solution, so nothing can be proven."""
    BROKEN = "broken"
    """Its image, setup or tests do not work."""
    NOOP_SOLVED = "solved by nothing"
    """An empty patch solves it."""
    PASSES_BEFORE = "passes before"
    """A test that must fail first passes without the solution."""
    FAILS_BEFORE = "fails before"
    """A test that must always pass fails without the solution."""
    GOLD_FAILS = "solution fails"
    """The known solution does not solve it."""
    UNSEEN = "tests not seen"
    """Declared tests are not reported with the solution."""
    TIMEOUT = "timeout"
    """The tests ran past the dataset's time limit."""
    FLAKY = "flaky"
    """A test's status differs from run to run."""
    LEAK = "leak"
    """The agent's sandbox contains the solution, the tests or the Task's name."""
    CHEAT = "cheat solves"
    """A patch that fixes nothing is graded as solved."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One Defect with its evidence."""

    defect: Defect
    detail: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Maximum resources of grading the known solution, over all runs."""

    grading_s: float = 0.0
    """Seconds of one grading in its open sandbox."""
    test_s: float = 0.0
    """Seconds of the test command."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Result of vetting one Task."""

    source: str
    """Digest of the row that was vetted."""
    row: str
    """Digest of the certified row; empty if it is rejected."""
    findings: tuple[Finding, ...]
    """Reasons of a rejection; empty if it is certified."""
    image: str
    """Digest of the image; empty if unknown."""
    backend: str
    """Sandbox backend of the vetting."""
    swerl: str
    """Version of swerl that vetted it."""
    gold_runs: int
    mutated: tuple[MutatedTests, ...] = ()
    """Becomes the Task's `grading.mutated`; empty in a certified row, which has it there."""
    not_run: tuple[str, ...] | None = None
    """Becomes the Task's `grading.not_run`."""
    strength: Strength | None = None
    """How well mutated tests protect the Task; None if an older release vetted it."""
    share: float = 0.0
    """Share of the tests to fix that assert a value which code has to compute."""
    why: str = ""
    """The reason for the strength, in one line."""
    timeout_s: float = 0.0
    """Becomes the Task's `grading.timeout_s`; 0 if no run was measured."""
    flaky: tuple[str, ...] = ()
    """Declared tests whose status differed between runs."""
    dropped: tuple[str, ...] = ()
    """Pass-to-pass tests removed from the spec because they did not pass in every run."""
    probes: Mapping[str, str] = field(default_factory=dict)
    """Cheat -> its verdict, or why it does not apply."""
    unchecked: tuple[str, ...] = ()
    """Parts of the image that the leak scan could not read."""
    removed: tuple[str, ...] = ()
    """Files of the image that hold the solution; every sandbox of the Task loses them."""
    measured: Measured = field(default_factory=Measured)

    @property
    def ok(self) -> bool:
        """True if the Task is admitted."""
        return bool(self.row) and not self.findings


def row_digest(task: Task) -> str:
    """Return the digest of every field that decides how an agent is prompted and graded."""
    bare = to_row(replace(task, certificate={}, metadata={}))
    text = json.dumps(bare, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def settled(task: Task, certificate: Certificate) -> Task:
    """Return the Task with vetting's decisions about its grading."""
    spec, dropped = task.grading, set(certificate.dropped)
    grading = replace(
        spec,
        pass_to_pass=tuple(test for test in spec.pass_to_pass if test not in dropped),
        mutated=certificate.mutated,
        not_run=certificate.not_run,
        timeout_s=certificate.timeout_s or spec.timeout_s,
    )
    return replace(task, grading=grading)


def certified(task: Task, certificate: Certificate) -> Task:
    """Return the Task with its Certificate; a rejected Task keeps its grading."""
    graded = settled(task, certificate) if certificate.ok else task
    return replace(graded, certificate=to_json(replace(certificate, mutated=())))


def objection(task: Task) -> str:
    """Return why a Task is not certified; empty if it is."""
    if not task.certificate:
        return "it was never vetted"
    findings = task.certificate.get("findings")
    if findings or not task.certificate.get("row"):
        first = findings[0] if isinstance(findings, list) and findings else {}
        why = first.get("defect", "") if isinstance(first, dict) else ""
        return f"vetting rejected it: {why}"
    if not task.certificate.get("strength"):
        return "an older release vetted it, without mutated tests; vet it again"
    if task.certificate["row"] != row_digest(task):
        return "its row was changed after it was vetted"
    return ""


def to_json(certificate: Certificate) -> dict[str, Json]:
    """Return a Certificate as JSON types."""
    row: dict[str, Json] = json.loads(json.dumps(asdict(certificate)))
    return row
