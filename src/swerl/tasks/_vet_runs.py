"""Single runs of vetting, each in a fresh sandbox: a grading, or a sweep for leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from swerl import plugins
from swerl.errors import SandboxError
from swerl.grade import Grade, Verdict
from swerl.interfaces import MeteredSandbox, Sandbox, SandboxBackend
from swerl.sandbox import Limits, Usage
from swerl.task import Task
from swerl.tasks.scrub import scrub
from swerl.tasks.set_up import set_up
from swerl.tasks.sweep import Sweep, sweep

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
        for _ in range(_TRIES):
            run = await self._grade(task, patch, read)
            if run.grade.verdict is not Verdict.INFRA:
                return run
        message = f"grading failed {_TRIES} times: {run.grade.reason}"
        raise SandboxError(message, hint="`swerl doctor` checks the machine")

    async def sweep(self, task: Task) -> Sweep:
        """Return what an agent would still find in its sandbox."""
        async with self._open(task) as sandbox:
            await scrub(sandbox, task)
            return await sweep(sandbox, task)

    async def _grade(self, task: Task, patch: str, read: Iterable[str]) -> Run:
        grader = plugins.load("graders", task.grading.grader).build()
        try:
            async with self._open(task) as sandbox:
                texts = await _texts(sandbox, task.workdir, read)
                grade = await grader.grade(task, patch, sandbox)
                return Run(grade, await _usage(sandbox), texts)
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


async def _texts(sandbox: Sandbox, workdir: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the files that exist and are text."""
    found = {}
    for path in paths:
        try:
            found[path] = (await sandbox.read(f"{workdir}/{path}")).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
    return found


async def _usage(sandbox: Sandbox) -> Usage:
    """Return what a sandbox took; a grading is not lost where that cannot be told any more."""
    try:
        return await sandbox.usage() if isinstance(sandbox, MeteredSandbox) else Usage()
    except SandboxError:
        return Usage()
