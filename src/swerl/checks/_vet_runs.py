"""The runs that vetting makes, each in fresh sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swerl.checks.scan_leaks import LeakScan, removable, scan
from swerl.core import plugins
from swerl.core.contracts import BlindGrader, MeteredSandbox, Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.grade import Grade, Verdict
from swerl.core.sandbox import Limits, Usage
from swerl.core.task import MeasuredSwaps, Task
from swerl.tasks.hide_future import Stage, hide_future
from swerl.tasks.set_up import set_up

_T = TypeVar("_T")

_TRIES = 3
"""Attempts at a run that the infrastructure loses, before vetting gives up for now."""
_AROUND_S = 1800.0
"""Seconds that a sandbox lives beyond its run of the tests."""


@dataclass(frozen=True, slots=True)
class GradedRun:
    """One grading."""

    grade: Grade
    usage: Usage = field(default_factory=Usage)
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
        """Grade a patch as an Episode would. Raises SandboxError if the infrastructure fails."""

        async def once() -> GradedRun:
            run = await self._grade(task, patch, read)
            if run.grade.verdict is Verdict.INFRA:
                raise SandboxError(run.grade.reason)
            return run

        return await _retried(once)

    async def measure(self, task: Task, num_runs: int) -> MeasuredSwaps:
        """Return swaps that the known solution notices. Raises SandboxError."""
        grader = plugins.load("graders", task.grading.grader).build()
        if not isinstance(grader, BlindGrader):
            return MeasuredSwaps()
        return await _retried(
            lambda: grader.measure(task, lambda: self._open(task, Stage.GRADING), num_runs)
        )

    async def scan_leaks(self, task: Task) -> LeakScan:
        """Return the leaks that an agent would still find in its sandbox."""
        async with self._open(task, Stage.AGENT) as sandbox:
            return await scan(sandbox, task)

    async def remove_leaks(self, task: Task) -> Cleaned:
        """Scan for leaks; record the files that can go, and scan again without them."""
        found = await self.scan_leaks(task)
        removed = sorted({removable(leak) for leak in found.leaks} - {""})
        if removed:
            task = replace(task, certificate={"removed": [*removed]})
            found = await self.scan_leaks(task)
        return Cleaned(task, tuple(removed), found)

    async def _grade(self, task: Task, patch: str, read: Iterable[str]) -> GradedRun:
        grader = plugins.load("graders", task.grading.grader).build()
        texts: dict[str, str] = {}
        used: list[Usage] = []
        # Sandboxes side by side would need more memory than a worker may take.
        one = asyncio.Lock()

        @asynccontextmanager
        async def open_clean() -> AsyncIterator[Sandbox]:
            async with one, self._open(task, Stage.GRADING) as sandbox:
                if not texts:
                    texts.update(await _texts(sandbox, task.workdir, read))
                yield sandbox
                used.append(await _usage(sandbox))

        try:
            grade = await grader.grade(task, patch, open_clean)
        except SandboxError as error:
            if not error.from_inside:
                raise
            return GradedRun(Grade(Verdict.UNSOLVED, reason=f"the sandbox failed: {error}"))
        peak = Usage(
            most(each.peak_memory_mib for each in used), most(each.disk_mib for each in used)
        )
        return GradedRun(grade, peak, texts)

    @asynccontextmanager
    async def _open(self, task: Task, stage: Stage) -> AsyncIterator[Sandbox]:
        lifetime_s = task.grading.timeout_s + _AROUND_S
        limits = replace(self.limits, lifetime_s=max(lifetime_s, self.limits.lifetime_s))
        async with self.backend.open(task.image, limits, workdir=task.workdir) as sandbox:
            await set_up(sandbox, task)
            await hide_future(sandbox, task, stage=stage)
            yield sandbox


async def _retried(call: Callable[[], Awaitable[_T]]) -> _T:
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


async def _usage(sandbox: Sandbox) -> Usage:
    """Return the resources that a sandbox has used, as far as they are known."""
    if isinstance(sandbox, MeteredSandbox):
        with suppress(SandboxError):  # a grading is not lost because its cost is unknown
            return await sandbox.usage()
    return Usage()


def most(values: Iterable[float | None]) -> float | None:
    """Return the largest of the values that are known."""
    return max((value for value in values if value is not None), default=None)


async def _texts(sandbox: Sandbox, workdir: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the files that exist and are text."""
    found = {}
    for path in paths:
        try:
            found[path] = (await sandbox.read(f"{workdir}/{path}")).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
    return found
