"""Certificate: what vetting found out about a Task, and whether it still speaks of the same one.

It stands in the Task's row and holds what vetting settled (the grader's time limit, its canary,
tests that were dropped), so that the certified Task follows from the Task and its Certificate. A
digest of the row ties the two together: what decides how an agent is asked or graded is in it, the
dataset's own facts and the Certificate itself are not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from swerl.core.chat import Json
from swerl.core.task import Task, to_row

_DIGEST_CHARS = 32


class Defect(StrEnum):
    """Why a Task is not admitted."""

    NO_SOLUTION = "no solution"
    """It brings no known solution, so nothing can be proven."""
    BROKEN = "broken"
    """Its image, setup or tests do not fit it."""
    NOOP_SOLVED = "solved by nothing"
    """It counts as solved without a change."""
    PASSES_BEFORE = "passes before"
    """A test to mend passes without the solution."""
    FAILS_BEFORE = "fails before"
    """A test to keep does not pass without the solution."""
    GOLD_FAILS = "solution fails"
    """The known solution does not solve it."""
    UNSEEN = "tests not seen"
    """Declared tests are not reported with the solution."""
    TIMEOUT = "timeout"
    """The tests ran past the dataset's time limit."""
    FLAKY = "flaky"
    """A test's status differs from run to run."""
    LEAK = "leak"
    """An agent would find the solution, the tests or the Task's name in its sandbox."""
    CHEAT = "cheat solves"
    """A patch that mends nothing counts as solved."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One Defect, with what a person needs to see it."""

    defect: Defect
    detail: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What grading the known solution took, the most of all runs."""

    grading_s: float = 0.0
    """Seconds of one grading in its open sandbox."""
    test_s: float = 0.0
    """Seconds of the test command."""
    peak_memory_mib: float | None = None
    """None where the sandbox cannot tell."""
    disk_mib: float | None = None
    """None where the sandbox cannot tell."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What vetting found out about one Task."""

    source: str
    """Digest of the row that was vetted."""
    row: str
    """Digest of the row that is certified; empty where it is rejected."""
    findings: tuple[Finding, ...]
    """Why it is rejected; empty where it is certified."""
    image: str
    """Digest of the image; empty where nobody tells one."""
    backend: str
    """Kind of sandbox that it was vetted in."""
    swerl: str
    """Version that vetted it."""
    gold_runs: int
    canary: bool | None = None
    """Becomes the Task's `grading.canary`."""
    timeout_s: float = 0.0
    """Becomes the Task's `grading.timeout_s`; 0 where no run was measured."""
    flaky: tuple[str, ...] = ()
    """Declared tests whose status differed between runs."""
    dropped: tuple[str, ...] = ()
    """Tests to keep that were taken out of the spec, as they did not pass in every run."""
    probes: Mapping[str, str] = field(default_factory=dict)
    """Cheat that was tried -> its verdict, or why it does not apply."""
    unchecked: tuple[str, ...] = ()
    """What the sweep for leaks could not look at."""
    measured: Measured = field(default_factory=Measured)

    @property
    def ok(self) -> bool:
        """Whether the Task is admitted."""
        return bool(self.row) and not self.findings


def row_digest(task: Task) -> str:
    """Name all of a Task that decides how an agent is asked and graded."""
    bare = to_row(replace(task, certificate={}, metadata={}))
    text = json.dumps(bare, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def settled(task: Task, certificate: Certificate) -> Task:
    """Return the Task with what vetting settled about its grading."""
    spec, dropped = task.grading, set(certificate.dropped)
    grading = replace(
        spec,
        pass_to_pass=tuple(test for test in spec.pass_to_pass if test not in dropped),
        canary=certificate.canary,
        timeout_s=certificate.timeout_s or spec.timeout_s,
    )
    return replace(task, grading=grading)


def certified(task: Task, certificate: Certificate) -> Task:
    """Return the Task with its Certificate in it; a rejected one keeps its grading."""
    found = settled(task, certificate) if certificate.ok else task
    return replace(found, certificate=to_json(certificate))


def objection(task: Task) -> str:
    """Return why a Task is not certified, or nothing where it is."""
    if not task.certificate:
        return "it was never vetted"
    findings = task.certificate.get("findings")
    if findings or not task.certificate.get("row"):
        first = findings[0] if isinstance(findings, list) and findings else {}
        why = first.get("defect", "") if isinstance(first, dict) else ""
        return f"vetting rejected it: {why}"
    if task.certificate["row"] != row_digest(task):
        return "its row was changed after it was vetted"
    return ""


def to_json(certificate: Certificate) -> dict[str, Json]:
    """Return a Certificate as JSON types; `from_json` reverses it."""
    found: dict[str, Json] = json.loads(json.dumps(asdict(certificate)))
    return found


def from_json(value: Mapping[str, Any]) -> Certificate:
    """Read a Certificate. Raises KeyError, TypeError or ValueError on anything else."""
    plain: dict[str, Any] = dict(value)
    findings = tuple(Finding(Defect(x["defect"]), x["detail"]) for x in plain.pop("findings"))
    plain |= {name: tuple(plain[name]) for name in ("flaky", "dropped", "unchecked")}
    measured = Measured(**plain.pop("measured"))
    return Certificate(**plain, findings=findings, measured=measured)
