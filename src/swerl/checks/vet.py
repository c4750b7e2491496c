"""Vet Tasks: prove that each can be solved, is unsolved at first, and is graded the same each time.

A Task takes these runs, each in a fresh sandbox: one without a change, several with the known
solution, one scan for leaks, and one for each cheat if nothing else speaks against it. If the
infrastructure fails, the Task gets no Certificate, and the next call vets it again.

The results of a file of Tasks are a journal to resume from, which gets a line for each vetted Task,
and the certified and rejected Tasks, which are written from the whole journal.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from swerl import __version__
from swerl.checks.scan_leaks import LeakScan, removable, scan
from swerl.checks.smoke import ReadDigest, no_digest
from swerl.checks.vet_cheats import cheats, files_to_change
from swerl.core import plugins
from swerl.core.certificate import (
    Certificate,
    Defect,
    Finding,
    Measured,
    certified,
    row_digest,
    settled,
    to_json,
)
from swerl.core.contracts import ConfirmingGrader, Sandbox, SandboxBackend
from swerl.core.errors import (
    BrokenImageError,
    InputError,
    SandboxError,
    SandboxUnavailableError,
    SwerlError,
)
from swerl.core.files import disk_errors, replacing
from swerl.core.grade import Confirmation, Grade, TestStatus, Verdict
from swerl.core.jobs import append_result, read_results, run_jobs
from swerl.core.sandbox import Limits
from swerl.core.task import Protection, Strength, Task, to_row
from swerl.grading import confirm
from swerl.grading.audit import Audit
from swerl.grading.statuses import not_run
from swerl.tasks import select
from swerl.tasks.hide_future import Stage, hide_future
from swerl.tasks.set_up import set_up

T = TypeVar("T")

_MEMORY_SHARE = 0.9
"""Share of the free memory that sandboxes may be promised."""
_TIME_FACTOR = 5.0
"""The time limit in units of the slowest run: a busy machine takes several times as long."""
_LEAST_TIME_S = 60.0
_NUM_NAMED = 3
"""Tests that a finding names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Rigour:
    """Requirements on a Task."""

    gold_runs: int = 3
    """Runs in which the known solution must solve it."""
    drop_flaky: bool = False
    """Drop tests to keep that do not pass in every run, and vet the Task without them."""


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
    digest: ReadDigest = no_digest
    journal: Mapping[str, Vetted] = field(default_factory=dict)
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
        image = await settings.digest(task.image)
        earlier = settings.journal.get(task.id)
        if earlier and _is_valid(earlier, task, image, settings.rigour):
            on_done(earlier, False)
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


def _is_valid(earlier: Vetted, task: Task, image: str, rigour: Rigour) -> bool:
    """Return True if an earlier result is of this row, image, rigour and release of swerl."""
    certificate = earlier.certificate
    return (
        certificate is not None
        and earlier.rigour == rigour
        and certificate.source == row_digest(task)
        and image in ("", certificate.image)
        and certificate.swerl == __version__
        and certificate.strength is not None
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
class _Draft:
    """The Certificate of a Task, as far as the runs have come."""

    task: Task
    findings: list[Finding] = field(default_factory=list)
    flaky: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    probes: dict[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    protection: Protection = field(default_factory=Protection)
    measured: Measured = field(default_factory=Measured)

    def add(self, defect: Defect, detail: str) -> None:
        self.findings.append(Finding(defect, detail))


async def _vet_task(task: Task, runs: Runs, settings: VetSettings) -> Certificate:
    """Vet one Task. Raises SwerlError if the infrastructure fails."""
    draft = _Draft(replace(task, certificate={}))
    try:
        await _make_runs(draft, runs, settings.rigour)
    except BrokenImageError as error:
        draft.add(Defect.BROKEN, str(error))
    protection = draft.protection
    certificate = Certificate(
        source=row_digest(task),
        row="",
        findings=tuple(draft.findings),
        # an image that a run has pulled has a digest only now
        image=await settings.digest(task.image),
        backend=settings.backend,
        swerl=__version__,
        gold_runs=settings.rigour.gold_runs,
        mutated=protection.versions,
        not_run=draft.task.grading.not_run,
        strength=protection.strength,
        share=protection.share,
        why=protection.reason,
        timeout_s=_time_limit(task.grading.timeout_s, draft.measured),
        flaky=draft.flaky,
        dropped=draft.dropped,
        probes=draft.probes,
        unchecked=draft.unchecked,
        removed=draft.removed,
        measured=draft.measured,
    )
    if certificate.findings:
        return certificate
    return replace(certificate, row=row_digest(settled(task, certificate)))


async def _make_runs(draft: _Draft, runs: Runs, rigour: Rigour) -> None:
    """Make every run; try cheats only against a Task without findings."""
    if not draft.task.gold_patch:
        draft.add(
            Defect.NO_SOLUTION, "without a known solution, nothing proves that it can be solved"
        )
        return
    noop = await runs.grade(draft.task, "", read=files_to_change(draft.task))
    if noop.grade.verdict is Verdict.INVALID:
        draft.add(Defect.BROKEN, noop.grade.reason)
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
    if not draft.findings:
        await _measure(draft, runs)
    await _search(draft, runs)
    if not draft.findings:
        await _cheat(draft, runs, noop)


async def _search(draft: _Draft, runs: Runs) -> None:
    """Scan for leaks. Remove files that can go, if the solution solves the Task without them."""
    cleaned = await runs.remove_leaks(draft.task)
    draft.task, draft.removed = cleaned.task, cleaned.removed
    leaks = cleaned.scan.leaks
    if draft.removed and not leaks:
        _judge_gold(draft, [await runs.grade(draft.task, draft.task.gold_patch)])
    draft.unchecked = cleaned.scan.unchecked
    if leaks:
        draft.add(Defect.LEAK, _named([f"{leak.kind} {leak.name}" for leak in leaks]))


async def _gold_runs(draft: _Draft, runs: Runs, count: int) -> list[GradedRun]:
    """Grade the known solution; stop after a run without a report, such as a timeout."""
    draft.task = replace(draft.task, grading=replace(draft.task.grading, mutated=(), not_run=None))
    gold: list[GradedRun] = []
    while len(gold) < count and (not gold or _solved(gold[-1].grade) or gold[-1].grade.tests):
        gold.append(await runs.grade(draft.task, draft.task.gold_patch))
        # Without declared tests, each grading with a skipped test asks the known solution.
        if confirm.is_declared(draft.task.grading):
            spec = replace(draft.task.grading, not_run=not_run(gold[0].grade.tests))
            draft.task = replace(draft.task, grading=spec)
    return gold


async def _measure(draft: _Draft, runs: Runs) -> None:
    """Measure the mutated tests; use none if the known solution is not confirmed with them."""
    protection = await runs.measure(draft.task)
    if protection.versions:
        spec = replace(draft.task.grading, mutated=protection.versions)
        task = replace(draft.task, grading=spec)
        grade = (await runs.grade(task, task.gold_patch)).grade
        if grade.confirmation is Confirmation.REAL:
            draft.protection, draft.task = protection, task
            return
        reason = f"the known solution is not confirmed: {grade.reason}"
        protection = Protection(strength=Strength.NONE, reason=reason)
    draft.protection = protection


def _judge_noop(draft: _Draft, grade: Grade) -> None:
    spec = draft.task.grading
    if grade.verdict is Verdict.TIMEOUT:
        draft.add(Defect.TIMEOUT, f"without a change, {grade.reason}")
        return
    if _solved(grade):
        draft.add(Defect.NOOP_SOLVED, grade.reason)
    passing = [
        test
        for test in spec.fail_to_pass
        if (status := grade.tests.get(test)) is not None and status.passes
    ]
    if passing:
        draft.add(Defect.PASSES_BEFORE, _named(passing))
    failing = [
        f"{test} ({grade.tests[test]})"
        for test in spec.pass_to_pass
        if test in grade.tests and not grade.tests[test].is_good
    ]
    if failing:
        draft.add(Defect.FAILS_BEFORE, _named(failing))


def _judge_gold(draft: _Draft, gold: Sequence[GradedRun]) -> None:
    if flaky := _flaky(gold):
        draft.add(Defect.FLAKY, _named(flaky))
        draft.flaky = tuple(dict.fromkeys((*draft.flaky, *flaky)))
    for grade in (run.grade for run in gold):
        if _solved(grade):
            continue
        unseen = [test for test, status in grade.tests.items() if status is TestStatus.MISSING]
        if grade.verdict is Verdict.TIMEOUT:
            draft.add(Defect.TIMEOUT, f"with the solution, {grade.reason}")
        elif grade.verdict is Verdict.INVALID:
            draft.add(Defect.BROKEN, grade.reason)
        elif unseen:
            draft.add(Defect.UNSEEN, _named(unseen))
        else:
            draft.add(Defect.GOLD_FAILS, grade.reason)
        return


async def _cheat(draft: _Draft, runs: Runs, noop: GradedRun) -> None:
    for cheat in cheats(draft.task, noop.texts):
        if cheat.why_not:
            draft.probes[cheat.name] = cheat.why_not
            continue
        grade = (await runs.grade(draft.task, cheat.patch)).grade
        draft.probes[cheat.name] = grade.verdict
        if _solved(grade):
            draft.add(Defect.CHEAT, cheat.name)


def _unsteady(task: Task, noop: GradedRun, gold: Sequence[GradedRun]) -> tuple[str, ...]:
    """Return the tests to keep that passed in some run but not in all of them."""
    grades = [noop.grade, *(run.grade for run in gold)]

    def results(test: str) -> set[bool]:
        return {grade.tests[test].is_good for grade in grades if test in grade.tests}

    return tuple(test for test in task.grading.pass_to_pass if len(results(test)) > 1)


def _flaky(gold: Sequence[GradedRun]) -> tuple[str, ...]:
    """Return the tests whose status differs between runs of the same patch."""
    statuses: dict[str, set[TestStatus]] = {}
    for run in gold:
        for test, status in run.grade.tests.items():
            statuses.setdefault(test, set()).add(status)
    return tuple(test for test, results in statuses.items() if len(results) > 1)


def _without(task: Task, tests: Iterable[str]) -> Task:
    gone = set(tests)
    rest = tuple(test for test in task.grading.pass_to_pass if test not in gone)
    return replace(task, grading=replace(task.grading, pass_to_pass=rest))


def _measured(gold: Sequence[GradedRun]) -> Measured:
    return Measured(
        grading_s=round(max(run.grade.duration_s for run in gold), 3),
        test_s=round(max(run.grade.test_s for run in gold), 3),
    )


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


_TRIES = 3
"""Attempts at a run that the infrastructure loses, before vetting gives up for now."""
_AROUND_S = 1800.0
"""Seconds that a sandbox lives beyond its run of the tests."""


@dataclass(frozen=True, slots=True)
class GradedRun:
    """One grading."""

    grade: Grade
    texts: Mapping[str, str] = field(default_factory=dict)
    """Files of the repository before the patch, by path."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A Task whose leaks that an image can spare are removed."""

    task: Task
    """It records the removed files, so that every sandbox of it loses them."""
    removed: tuple[str, ...]
    scan: LeakScan
    """The scan without them; a Task with leaks in it is rejected."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Make runs on one backend under the same limits."""

    backend: SandboxBackend
    limits: Limits

    async def grade(self, task: Task, patch: str, *, read: Iterable[str] = ()) -> GradedRun:
        """Grade a patch, and confirm a solved one. Raises SandboxError."""

        async def once() -> GradedRun:
            run = await self._grade(task, patch, read)
            if run.grade.verdict is Verdict.INFRA:
                raise SandboxError(run.grade.reason)
            return run

        return await _retried(once)

    async def measure(self, task: Task) -> Protection:
        """Return mutated tests that the known solution notices. Raises SandboxError."""
        grader = plugins.load("graders", task.grading.grader).build()
        if not isinstance(grader, ConfirmingGrader):
            return Protection()
        return await _retried(lambda: grader.measure(task, lambda: self._open(task, Stage.GRADING)))

    async def scan_leaks(self, task: Task) -> LeakScan:
        """Return the leaks that an agent would still find in its sandbox."""
        async with self._open(task, Stage.AGENT) as sandbox:
            return await scan(sandbox, task)

    async def remove_leaks(self, task: Task) -> Cleaned:
        """Scan for leaks; record the files that can go, and scan again without them."""
        leak_scan = await self.scan_leaks(task)
        removed = sorted({removable(leak) for leak in leak_scan.leaks} - {""})
        if removed:
            task = replace(task, certificate={"removed": [*removed]})
            leak_scan = await self.scan_leaks(task)
        return Cleaned(task, tuple(removed), leak_scan)

    async def _grade(self, task: Task, patch: str, read: Iterable[str]) -> GradedRun:
        grader = plugins.load("graders", task.grading.grader).build()
        texts: dict[str, str] = {}
        # Sandboxes side by side would need more memory than a worker may take.
        lock = asyncio.Lock()

        @asynccontextmanager
        async def open_clean() -> AsyncIterator[Sandbox]:
            async with lock, self._open(task, Stage.GRADING) as sandbox:
                if not texts:
                    texts.update(await _texts(sandbox, task.workdir, read))
                yield sandbox

        try:
            grade = await Audit(1.0).grade(grader, task, patch, open_clean, text=patch)
        except SandboxError as error:
            if not error.from_inside:
                raise
            return GradedRun(Grade(Verdict.UNSOLVED, reason=f"the sandbox failed: {error}"))
        return GradedRun(grade, texts)

    @asynccontextmanager
    async def _open(self, task: Task, stage: Stage) -> AsyncIterator[Sandbox]:
        lifetime_s = task.grading.timeout_s + _AROUND_S
        limits = replace(self.limits, lifetime_s=max(lifetime_s, self.limits.lifetime_s))
        async with self.backend.open(task.image, limits, workdir=task.workdir) as sandbox:
            await set_up(sandbox, task)
            await hide_future(sandbox, task, stage=stage)
            yield sandbox


async def _retried(call: Callable[[], Awaitable[T]]) -> T:
    """Call until it does not fail, a few times. Raises SandboxError."""
    reason = ""
    for _ in range(_TRIES):
        try:
            return await call()
        except SandboxUnavailableError:
            raise
        except SandboxError as error:
            reason = str(error)
    raise SandboxError(
        f"grading failed {_TRIES} times: {reason}", hint="`swerl doctor` checks the machine"
    )


async def _texts(sandbox: Sandbox, workdir: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the files that exist and are text."""
    texts = {}
    for path in paths:
        try:
            texts[path] = (await sandbox.read(f"{workdir}/{path}")).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
    return texts


def journal_path(out: Path) -> Path:
    """Return the journal of a vetting into `out`."""
    return out.with_name(f"{out.stem}.journal.jsonl")


def rejected_path(out: Path) -> Path:
    """Return the file of the Tasks that a vetting into `out` rejects."""
    return out.with_name(f"{out.stem}.rejected.jsonl")


@contextmanager
def locked(journal: Path) -> Iterator[None]:
    """Lock a journal against other processes. Raises InputError if one holds the lock."""
    with ExitStack() as stack:
        with disk_errors(journal):
            lock = stack.enter_context(journal.open("ab"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is vetting into {journal}",
                hint="wait for it, or pass -o with another file",
            ) from error
        yield


def read_journal(journal: Path) -> dict[str, Vetted]:
    """Return the results by Task id. Raises InputError on a file of something else."""
    from_row, hint = TypeAdapter(Vetted).validate_python, "pass -o with another file"
    rows = read_results(journal, from_row, kind="result of vetting", hint=hint)
    return {vetted.task: vetted for vetted in rows}


def append_to_journal(journal: Path, vetted: Vetted) -> None:
    """Append a result as one line. Raises RunError."""
    append_result(journal, as_row(vetted))


def as_row(vetted: Vetted) -> dict[str, Any]:
    """Return a result as JSON types."""
    certificate = to_json(vetted.certificate) if vetted.certificate else None
    return {**asdict(vetted), "ok": vetted.ok, "certificate": certificate}


def write_results(tasks: Path, out: Path, results: Mapping[str, Vetted]) -> tuple[int, int]:
    """Write the certified Tasks to `out` and the rejected ones beside it; return their numbers.

    A Task that was not vetted, or whose row has changed since, is in neither file.
    """
    counts = {True: 0, False: 0}
    with _whole(out) as accepted, _whole(rejected_path(out)) as rejected:
        for _, task in select.lines(tasks):
            vetted = results.get(task.id)
            certificate = vetted.certificate if vetted else None
            if certificate is None or certificate.source != row_digest(task):
                continue
            row = to_row(certified(task, certificate))
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            (accepted if certificate.ok else rejected).write(line)
            counts[certificate.ok] += 1
    return counts[True], counts[False]


@contextmanager
def _whole(path: Path) -> Iterator[Any]:
    """Yield a file that appears under its name once all is written, or not at all."""
    with replacing(path) as part, part.open("wb") as file:
        yield file
