"""Vet Tasks: prove that each can be solved, is unsolved at first, and is graded the same each time.

A Task takes these runs, each in a fresh sandbox: one without a change, several with the known
solution, one scan for leaks, and one for each cheat if nothing else speaks against it. If the
infrastructure fails, the Task gets no Certificate, and the next call vets it again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from swerl.checks._vet_cheats import cheats, files_to_change
from swerl.checks._vet_runs import GradedRun, Runs, most
from swerl.checks.smoke import ReadFacts, no_facts
from swerl.core.certificate import Certificate, Defect, Finding, Measured, row_digest, settled
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import BrokenImageError, SandboxUnavailableError, SwerlError
from swerl.core.grade import Blind, Grade, TestStatus, Verdict
from swerl.core.jobs import run_jobs
from swerl.core.sandbox import Limits
from swerl.core.task import Swap, Task
from swerl.grading import blind

_MEMORY_SHARE = 0.9
"""Share of the free memory that sandboxes may be promised."""
_TIME_FACTOR = 5.0
"""The time limit in units of the slowest run: a busy machine takes several times as long."""
_LEAST_TIME_S = 60.0
_SWAP_RUNS = 4
"""Runs of the known solution that measure swaps: so many different ones for each test."""
_NUM_NAMED = 3
"""Tests that a finding names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Rigour:
    """Requirements on a Task."""

    gold_runs: int = 3
    """Runs in which the known solution must solve it."""
    drop_flaky: bool = False
    """Drop tests to keep that do not pass in every run, and vet the Task without them."""
    whole_image: bool = False
    """Reject a Task if a part of its image could not be scanned for leaks."""


@dataclass(frozen=True, slots=True)
class Vetted:
    """The result of vetting one Task."""

    task: str
    """Its id."""
    rigour: Rigour
    certificate: Certificate | None = None
    """None if the infrastructure failed."""
    failure: str = ""
    """The infrastructure's error and its remedy; empty if there was none."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the Task is admitted."""
        return self.certificate is not None and self.certificate.ok


@dataclass(frozen=True, slots=True)
class VetSettings:
    backend: str
    """Name of the kind of sandbox, for the certificate."""
    rigour: Rigour = field(default_factory=Rigour)
    num_workers: int = 1
    """Tasks at once, each in one sandbox at a time."""
    limits: Limits = field(default_factory=Limits)
    facts: ReadFacts = no_facts
    done: Mapping[str, Vetted] = field(default_factory=dict)
    """Earlier results by Task id; one is kept while row, image, rigour and swerl are the same."""


async def vet(
    backend: SandboxBackend,
    tasks: Iterable[Task],
    settings: VetSettings,
    *,
    on_done: Callable[[Vetted, bool], None],
) -> None:
    """Vet every Task without a valid earlier result.

    Tasks are read as they are needed. `on_done` gets each result, and True if it is new. Raises
    SandboxUnavailableError if the backend cannot run at all.
    """
    runs = Runs(backend, settings.limits)

    async def vet_one(task: Task) -> None:
        image = (await settings.facts(task.image)).digest
        known = settings.done.get(task.id)
        if known and _is_valid(known, task, image, settings.rigour):
            on_done(known, False)
        else:
            on_done(await _vet_or_fail(task, runs, settings), True)

    await run_jobs(tasks, vet_one, limit=settings.num_workers)


def fitting_workers(limits: Limits) -> int:
    """Return how many sandboxes of this size this machine runs at once without sharing cores."""
    cores = len(os.sched_getaffinity(0)) / limits.num_cpus
    memory = _free_memory_mib() * _MEMORY_SHARE / limits.memory_mib
    return max(1, int(min(cores, memory)))


def _free_memory_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _is_valid(known: Vetted, task: Task, image: str, rigour: Rigour) -> bool:
    """Return True if an earlier result is of this row, image, rigour and release of swerl."""
    found = known.certificate
    return (
        found is not None
        and known.rigour == rigour
        and found.source == row_digest(task)
        and image in ("", found.image)
        and found.swerl == version("swerl")
    )


async def _vet_or_fail(task: Task, runs: Runs, settings: VetSettings) -> Vetted:
    started = time.monotonic()
    certificate, failure = None, ""
    try:
        certificate = await _vet_task(task, runs, settings)
    except SandboxUnavailableError:
        raise
    except SwerlError as error:
        failure = error.explained()
    seconds = round(time.monotonic() - started, 3)
    return Vetted(task.id, settings.rigour, certificate, failure, seconds)


@dataclass(slots=True)
class _Findings:
    """The Certificate of a Task, as far as the runs have come."""

    task: Task
    findings: list[Finding] = field(default_factory=list)
    flaky: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    probes: dict[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    claims_share: float = 0.0
    measured: Measured = field(default_factory=Measured)

    def add(self, defect: Defect, detail: str) -> None:
        self.findings.append(Finding(defect, detail))


async def _vet_task(task: Task, runs: Runs, settings: VetSettings) -> Certificate:
    """Vet one Task. Raises SwerlError if the infrastructure fails."""
    found = _Findings(replace(task, certificate={}))
    try:
        await _make_runs(found, runs, settings.rigour)
    except BrokenImageError as error:
        found.add(Defect.BROKEN, str(error))
    swaps = found.task.grading.swaps or ()
    certificate = Certificate(
        source=row_digest(task),
        row="",
        findings=tuple(found.findings),
        # an image that a run has pulled has a digest only now
        image=(await settings.facts(task.image)).digest,
        backend=settings.backend,
        swerl=version("swerl"),
        gold_runs=settings.rigour.gold_runs,
        swaps=swaps,
        not_run=found.task.grading.not_run,
        swapped_share=round(blind.share(found.task.grading, swaps), 3),
        swapped_claims=round(found.claims_share, 3),
        bits=blind.bits(swaps, found.task.grading.blind_runs),
        timeout_s=_time_limit(task.grading.timeout_s, found.measured),
        flaky=found.flaky,
        dropped=found.dropped,
        probes=found.probes,
        unchecked=found.unchecked,
        removed=found.removed,
        measured=found.measured,
    )
    if certificate.findings:
        return certificate
    return replace(certificate, row=row_digest(settled(task, certificate)))


async def _make_runs(found: _Findings, runs: Runs, rigour: Rigour) -> None:
    """Make every run; try cheats only against a Task without findings."""
    if not found.task.gold_patch:
        found.add(
            Defect.NO_SOLUTION, "without a known solution, nothing proves that it can be solved"
        )
        return
    noop = await runs.grade(found.task, "", read=files_to_change(found.task))
    if noop.grade.verdict is Verdict.INVALID:
        found.add(Defect.BROKEN, noop.grade.reason)
        return
    gold = await _gold_runs(found, runs, rigour.gold_runs)
    if rigour.drop_flaky and (unsteady := _unsteady(found.task, noop, gold)):
        found.flaky = _flaky(gold)
        found.dropped = unsteady
        found.task = _without(found.task, unsteady)
        gold = await _gold_runs(found, runs, rigour.gold_runs)
    found.measured = _measured(gold)
    _judge_noop(found, noop.grade)
    _judge_gold(found, gold)
    await _search(found, runs)
    if rigour.whole_image and found.unchecked:
        found.add(Defect.UNCHECKED, _named(found.unchecked))
    if not found.findings:
        await _cheat(found, runs, noop)


async def _search(found: _Findings, runs: Runs) -> None:
    """Scan for leaks. Remove files that can go, if the solution solves the Task without them."""
    cleaned = await runs.remove_leaks(found.task)
    found.task, found.removed = cleaned.task, cleaned.removed
    leaks = cleaned.scan.leaks
    if found.removed and not leaks:
        _judge_gold(found, [await runs.grade(found.task, found.task.gold_patch)])
    found.unchecked = cleaned.scan.unchecked
    if leaks:
        found.add(Defect.LEAK, _named([f"{leak.kind} {leak.name}" for leak in leaks]))


async def _gold_runs(found: _Findings, runs: Runs, count: int) -> list[GradedRun]:
    """Measure the swaps, then grade the known solution.

    If the solution does not fail as predicted in a blind run, no swap is used.
    """
    measured = await runs.measure(found.task, _SWAP_RUNS)
    found.claims_share = measured.claims_share
    gold = await _graded(found, runs, count, measured.swaps)
    mismatched = (Blind.FORGED, Blind.UNSTEADY)
    if any(run.grade.blind in mismatched for run in gold):
        found.claims_share = 0.0
        gold = await _graded(found, runs, count, ())
    return gold


async def _graded(
    found: _Findings, runs: Runs, count: int, swaps: tuple[Swap, ...]
) -> list[GradedRun]:
    """Grade the known solution; stop after a run without a report, such as a timeout."""
    spec = replace(found.task.grading, swaps=swaps, not_run=None)
    found.task = replace(found.task, grading=spec)
    gold: list[GradedRun] = []
    while len(gold) < count and (not gold or _solved(gold[-1].grade) or gold[-1].grade.tests):
        gold.append(await runs.grade(found.task, found.task.gold_patch))
        # Without declared tests, each grading with a skipped test asks the known solution.
        if blind.is_declared(spec):
            spec = replace(spec, not_run=blind.not_run(gold[0].grade.tests))
            found.task = replace(found.task, grading=spec)
    return gold


def _judge_noop(found: _Findings, grade: Grade) -> None:
    spec = found.task.grading
    if grade.verdict is Verdict.TIMEOUT:
        found.add(Defect.TIMEOUT, f"without a change, {grade.reason}")
        return
    if _solved(grade):
        found.add(Defect.NOOP_SOLVED, grade.reason)
    passing = [
        test
        for test in spec.fail_to_pass
        if (status := grade.tests.get(test)) is not None and status.passes
    ]
    if passing:
        found.add(Defect.PASSES_BEFORE, _named(passing))
    failing = [
        f"{test} ({grade.tests[test]})"
        for test in spec.pass_to_pass
        if test in grade.tests and not grade.tests[test].is_good
    ]
    if failing:
        found.add(Defect.FAILS_BEFORE, _named(failing))


def _judge_gold(found: _Findings, gold: Sequence[GradedRun]) -> None:
    if flaky := _flaky(gold):
        found.add(Defect.FLAKY, _named(flaky))
        found.flaky = tuple(dict.fromkeys((*found.flaky, *flaky)))
    for grade in (run.grade for run in gold):
        if _solved(grade):
            continue
        unseen = [test for test, status in grade.tests.items() if status is TestStatus.MISSING]
        if grade.verdict is Verdict.TIMEOUT:
            found.add(Defect.TIMEOUT, f"with the solution, {grade.reason}")
        elif grade.verdict is Verdict.INVALID:
            found.add(Defect.BROKEN, grade.reason)
        elif unseen:
            found.add(Defect.UNSEEN, _named(unseen))
        else:
            found.add(Defect.GOLD_FAILS, grade.reason)
        return


async def _cheat(found: _Findings, runs: Runs, noop: GradedRun) -> None:
    for cheat in cheats(found.task, noop.texts):
        if cheat.why_not:
            found.probes[cheat.name] = cheat.why_not
            continue
        grade = (await runs.grade(found.task, cheat.patch)).grade
        found.probes[cheat.name] = grade.verdict
        if _solved(grade):
            found.add(Defect.CHEAT, cheat.name)


def _unsteady(task: Task, noop: GradedRun, gold: Sequence[GradedRun]) -> tuple[str, ...]:
    """Return the tests to keep that passed in some run but not in all of them."""
    grades = [noop.grade, *(run.grade for run in gold)]

    def results(test: str) -> set[bool]:
        return {grade.tests[test].is_good for grade in grades if test in grade.tests}

    return tuple(test for test in task.grading.pass_to_pass if len(results(test)) > 1)


def _flaky(gold: Sequence[GradedRun]) -> tuple[str, ...]:
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


def _measured(gold: Sequence[GradedRun]) -> Measured:
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
    """Return a limit that a slow but honest run meets, at most the dataset's."""
    if not measured.test_s:
        return 0.0
    return min(given_s, max(_LEAST_TIME_S, math.ceil(_TIME_FACTOR * measured.test_s)))


def _solved(grade: Grade) -> bool:
    return grade.verdict is Verdict.SOLVED


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
