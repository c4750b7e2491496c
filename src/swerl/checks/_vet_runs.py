"""Single runs of vetting, each in a fresh sandbox: a grading, or a sweep for leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace

from swerl.checks.scan_leaks import Sweep, sweep
from swerl.core import plugins
from swerl.core.contracts import MeteredSandbox, Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.grade import Grade, Verdict
from swerl.core.sandbox import Limits, Usage
from swerl.core.task import Task
from swerl.tasks.hide_future import scrub
from swerl.tasks.set_up import set_up

_TRIES = 3
"""How often a run that the machinery lost is made before vetting gives up for now."""
_AROUND_S = 1800.0
"""Seconds that a sandbox lives beyond the two runs of tests that a grading may take."""


@dataclass(frozen=True, slots=True)
class Run:
    """One grading."""

    grade: Grade
    usage: Usage = field(default_factory=Usage)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Files of the repository as they stood before the patch, by path."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Makes runs of one backend under the same limits."""

    backend: SandboxBackend
    limits: Limits

    async def grade(self, task: Task, patch: str, *, read: Iterable[str] = ()) -> Run:
        """Grade a patch as an Episode would. Raises SandboxError where the machinery fails."""
        reason = ""
        for _ in range(_TRIES):
            try:
                run = await self._grade(task, patch, read)
            except SandboxUnavailableError:
                raise
            except SandboxError as error:
                reason = str(error)
                continue
            if run.grade.verdict is not Verdict.INFRA:
                return run
            reason = run.grade.reason
        raise SandboxError(
            f"grading failed {_TRIES} times: {reason}", hint="`swerl doctor` checks the machine"
        )

    async def sweep(self, task: Task) -> Sweep:
        """Return what an agent would still find in its sandbox."""
        async with self._open(task) as sandbox:
            await scrub(sandbox, task)
            return await sweep(sandbox, task)

    async def _grade(self, task: Task, patch: str, read: Iterable[str]) -> Run:
        grader = plugins.load("graders", task.grading.grader).build()
        try:
            async with _OneAtATime(lambda: self._open(task)) as one:
                sandbox = await one.fresh()
                texts = await _texts(sandbox, task.workdir, read)
                grade = await grader.grade(task, patch, sandbox, one.fresh)
                return Run(grade, await one.usage(), texts)
        except SandboxError as error:
            if not error.from_inside:
                raise
            return Run(Grade(Verdict.UNSOLVED, reason=f"the sandbox failed: {error}"))

    @asynccontextmanager
    async def _open(self, task: Task) -> AsyncIterator[Sandbox]:
        lifetime_s = 2 * task.grading.timeout_s + _AROUND_S
        limits = replace(self.limits, lifetime_s=max(lifetime_s, self.limits.lifetime_s))
        async with self.backend.open(task.image, limits, workdir=task.workdir) as sandbox:
            await set_up(sandbox, task)
            yield sandbox


class _OneAtATime:
    """Sandboxes of which each is closed before the next one is opened."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._begin = begin
        self._stack = AsyncExitStack()
        self._open: Sandbox | None = None
        self._used = Usage()

    async def __aenter__(self) -> _OneAtATime:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def fresh(self) -> Sandbox:
        """Close the sandbox in use and open another."""
        await self.usage()
        await self._stack.aclose()
        self._open = await self._stack.enter_async_context(self._begin())
        return self._open

    async def usage(self) -> Usage:
        """Return the most that one of them took, as far as it can be told."""
        if isinstance(self._open, MeteredSandbox):
            with suppress(SandboxError):  # a grading is not lost because its cost is not known
                told = await self._open.usage()
                self._used = Usage(
                    most([self._used.peak_memory_mib, told.peak_memory_mib]),
                    most([self._used.disk_mib, told.disk_mib]),
                )
        return self._used


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
