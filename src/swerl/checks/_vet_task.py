"""Vetting one Task: which runs it takes, and what speaks against the Task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from swerl.checks._vet_cheats import cheats, wanted
from swerl.checks._vet_runs import Run, Runs, most
from swerl.core.certificate import Certificate, Defect, Finding, Measured, row_digest, settled
from swerl.core.errors import BrokenImageError
from swerl.core.grade import Canary, Grade, TestStatus, Verdict
from swerl.core.task import Task
from swerl.grading.prepare import can_plant

_TIME_FACTOR = 5.0
"""The time limit in units of the slowest run: a busy machine takes several times as long."""
_LEAST_TIME_S = 60.0
_NUM_NAMED = 3
"""Tests that a finding names; the rest are counted."""
_PASSES = frozenset({TestStatus.PASSED, TestStatus.XFAIL})


@dataclass(frozen=True, slots=True)
class Rigour:
    """How much is asked of a Task."""

    gold_runs: int = 3
    """How often the known solution must solve it."""
    drop_flaky: bool = False
    """Whether tests to keep that do not pass in every run are dropped, and not held against it."""


@dataclass(slots=True)
class _Draft:
    """What is known so far."""

    task: Task
    findings: list[Finding] = field(default_factory=list)
    flaky: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    probes: dict[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    measured: Measured = field(default_factory=Measured)

    def object(self, defect: Defect, detail: str) -> None:
        """Hold something against the Task."""
        self.findings.append(Finding(defect, detail))


async def vet_task(
    task: Task, runs: Runs, rigour: Rigour, *, backend: str, version: str
) -> Certificate:
    """Vet one Task; which image it ran in is for the caller to fill in.

    Raises SwerlError where the machinery fails, which says nothing about the Task.
    """
    draft = _Draft(replace(task, certificate={}))
    try:
        await _vet(draft, runs, rigour)
    except BrokenImageError as error:
        draft.object(Defect.BROKEN, str(error))
    spec = draft.task.grading
    certificate = Certificate(
        source=row_digest(task),
        row="",
        findings=tuple(draft.findings),
        image="",
        backend=backend,
        swerl=version,
        gold_runs=rigour.gold_runs,
        canary=spec.canary,
        timeout_s=_time_limit(task.grading.timeout_s, draft.measured),
        flaky=draft.flaky,
        dropped=draft.dropped,
        probes=draft.probes,
        unchecked=draft.unchecked,
        measured=draft.measured,
    )
    if certificate.findings:
        return certificate
    return replace(certificate, row=row_digest(settled(task, certificate)))


async def _vet(draft: _Draft, runs: Runs, rigour: Rigour) -> None:
    """Run everything, and cheat only against a Task that holds so far."""
    if not draft.task.gold_patch:
        draft.object(Defect.NO_SOLUTION, "a known solution is what shows that it can be solved")
        return
    noop = await runs.grade(draft.task, "", read=wanted(draft.task))
    if _invalid(noop.grade):
        draft.object(Defect.BROKEN, noop.grade.reason)
        return
    gold = await _gold_runs(draft, runs, rigour.gold_runs)
    if rigour.drop_flaky and (unsteady := _unsteady(draft.task, noop, gold)):
        draft.flaky = _flaky(gold)
        draft.dropped = unsteady
        draft.task = _without(draft.task, unsteady)
        gold = await _gold_runs(draft, runs, rigour.gold_runs)
    draft.measured = _measured(gold)
    _judge_noop(draft, noop.grade)
    _judge_gold(draft, gold)
    await _sweep(draft, runs)
    if not draft.findings:
        await _cheat(draft, runs, noop)


async def _gold_runs(draft: _Draft, runs: Runs, count: int) -> list[Run]:
    """Grade the known solution; a run that ended without a report, such as a timeout, once only."""
    first = await _first_gold(draft, runs)
    found = [first]
    while len(found) < count and (_solved(found[-1].grade) or found[-1].grade.tests):
        found.append(await runs.grade(draft.task, draft.task.gold_patch))
    draft.task = _with_canary(draft.task, all(_shows_canary(run.grade) for run in found))
    return found


async def _first_gold(draft: _Draft, runs: Runs) -> Run:
    """Grade the known solution, and find out on the way whether its report can show a canary.

    What the text of the test command promises is tried the other way round where it does not hold.
    """
    task = draft.task
    first = await runs.grade(task, task.gold_patch)
    if task.grading.canary is not None:
        return first
    if first.grade.canary is Canary.NONE and _solved(first.grade) and can_plant(task):
        other = _with_canary(task, True)
        again = await runs.grade(other, task.gold_patch)
        holds = _solved(again.grade) and _shows_canary(again.grade)
    elif first.grade.canary is not Canary.NONE and not _solved(first.grade):
        other = _with_canary(task, False)
        again = await runs.grade(other, task.gold_patch)
        holds = _solved(again.grade)
    else:
        return first
    if holds:
        draft.task = other
    return again if holds else first


def _with_canary(task: Task, canary: bool) -> Task:
    return replace(task, grading=replace(task.grading, canary=canary))


def _shows_canary(grade: Grade) -> bool:
    return grade.canary is Canary.FAILED


def _judge_noop(draft: _Draft, grade: Grade) -> None:
    spec = draft.task.grading
    if grade.verdict is Verdict.TIMEOUT:
        draft.object(Defect.TIMEOUT, f"without a change, {grade.reason}")
        return
    if _solved(grade):
        draft.object(Defect.NOOP_SOLVED, grade.reason)
    passing = [test for test in spec.fail_to_pass if grade.tests.get(test) in _PASSES]
    if passing:
        draft.object(Defect.PASSES_BEFORE, _named(passing))
    failing = [
        f"{test} ({grade.tests[test]})"
        for test in spec.pass_to_pass
        if test in grade.tests and not grade.tests[test].is_good
    ]
    if failing:
        draft.object(Defect.FAILS_BEFORE, _named(failing))


def _judge_gold(draft: _Draft, gold: Sequence[Run]) -> None:
    if flaky := _flaky(gold):
        draft.object(Defect.FLAKY, _named(flaky))
        draft.flaky = tuple(dict.fromkeys((*draft.flaky, *flaky)))
    for grade in (run.grade for run in gold):
        if _solved(grade):
            continue
        unseen = [test for test, status in grade.tests.items() if status is TestStatus.MISSING]
        if grade.verdict is Verdict.TIMEOUT:
            draft.object(Defect.TIMEOUT, f"with the solution, {grade.reason}")
        elif _invalid(grade):
            draft.object(Defect.BROKEN, grade.reason)
        elif unseen:
            draft.object(Defect.UNSEEN, _named(unseen))
        else:
            draft.object(Defect.GOLD_FAILS, grade.reason)
        return


async def _sweep(draft: _Draft, runs: Runs) -> None:
    swept = await runs.sweep(draft.task)
    draft.unchecked = swept.unchecked
    if swept.leaks:
        draft.object(Defect.LEAK, _named([f"{leak.kind} {leak.name}" for leak in swept.leaks]))


async def _cheat(draft: _Draft, runs: Runs, noop: Run) -> None:
    for cheat in cheats(draft.task, noop.texts):
        if cheat.why_not:
            draft.probes[cheat.name] = cheat.why_not
            continue
        grade = (await runs.grade(draft.task, cheat.patch)).grade
        draft.probes[cheat.name] = grade.verdict
        if _solved(grade):
            draft.object(Defect.CHEAT, cheat.name)


def _unsteady(task: Task, noop: Run, gold: Sequence[Run]) -> tuple[str, ...]:
    """Return the tests to keep that passed in some run but not in all of them."""
    grades = [noop.grade, *(run.grade for run in gold)]
    return tuple(test for test in task.grading.pass_to_pass if len(_goodness(test, grades)) > 1)


def _goodness(test: str, grades: Iterable[Grade]) -> set[bool]:
    return {grade.tests[test].is_good for grade in grades if test in grade.tests}


def _flaky(gold: Sequence[Run]) -> tuple[str, ...]:
    """Return the tests whose status differs between runs of the same patch."""
    seen: dict[str, set[TestStatus]] = {}
    for run in gold:
        for test, status in run.grade.tests.items():
            seen.setdefault(test, set()).add(status)
    return tuple(test for test, statuses in seen.items() if len(statuses) > 1)


def _without(task: Task, tests: Iterable[str]) -> Task:
    gone = set(tests)
    kept = tuple(test for test in task.grading.pass_to_pass if test not in gone)
    return replace(task, grading=replace(task.grading, pass_to_pass=kept))


def _measured(gold: Sequence[Run]) -> Measured:
    memory = [run.usage.peak_memory_mib for run in gold]
    disk = [run.usage.disk_mib for run in gold]
    return Measured(
        grading_s=round(max(run.grade.duration_s for run in gold), 3),
        test_s=round(max(run.grade.test_s for run in gold), 3),
        peak_memory_mib=_rounded(most(memory)),
        disk_mib=_rounded(most(disk)),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _time_limit(given_s: float, measured: Measured) -> float:
    """Return a limit that a slow but honest run keeps, and never more than the dataset's."""
    if not measured.test_s:
        return 0.0
    return min(given_s, max(_LEAST_TIME_S, math.ceil(_TIME_FACTOR * measured.test_s)))


def _solved(grade: Grade) -> bool:
    return grade.verdict is Verdict.SOLVED


def _invalid(grade: Grade) -> bool:
    return grade.verdict is Verdict.INVALID


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
