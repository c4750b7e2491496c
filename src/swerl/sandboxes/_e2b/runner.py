"""Carries jobs in one sandbox from their start to their end, over streams that may break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes._e2b.errors import CutError
from swerl.sandboxes._e2b.job import INLINE_BYTES, RUN, Job, Report, Shown
from swerl.sandboxes._e2b.sdk import Machine, Provider, Shell

T = TypeVar("T")

_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses between attempts to take up a broken stream; the last repeats."""
_GIVE_UP_S = 60.0
"""Seconds of broken attempts after which a sandbox counts as lost."""
_STOP_TIMEOUT_S = 20.0
_MOST_FRUITLESS = 2
"""Whole streams in a row that may show nothing new; then the image lacks what a job needs."""


class DefiedError(SandboxLostError):
    """The sandbox answers, and a command in it cannot be killed."""


class Runner:
    """Runs jobs in one sandbox."""

    def __init__(self, provider: Provider, machine: Machine, lifetime_s: float) -> None:
        self._provider = provider
        self._machine = machine
        self._lifetime_s = lifetime_s
        self._ends_at = time.monotonic() + lifetime_s
        self._stale: dict[str | None, list[str]] = {}
        """Folders of jobs that are over, by the user who may remove them."""
        self.ended: asyncio.Future[SandboxLostError] = asyncio.get_running_loop().create_future()
        """Why nothing can be run any more."""
        self.is_set_up = False
        """Whether the image can run commands; what fails after that, its agent brought about."""

    def lose(self, error: SandboxLostError) -> None:
        """Let everything under way, and all that is asked from now on, fail with this error."""
        if not self.ended.done():
            self.ended.set_result(error)

    async def unless_lost(self, work: Coroutine[object, object, T]) -> T:
        """Return what `work` returns. Raises SandboxLostError as soon as the sandbox is lost."""
        if self.ended.done():
            work.close()
            raise self.ended.result()
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self.ended.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def finish(self, job: Job, shown: Shown) -> Report:
        """Run a job until it has ended and all that it printed was shown.

        Raises SandboxLostError, and SandboxError where it cannot be started.
        """
        job, facts_file = await self._hand_over(job)
        await self.resume(job, shown, facts_file)
        self._forget(job)
        assert shown.report is not None
        return shown.report

    async def resume(self, job: Job, shown: Shown, facts_file: str = "") -> None:
        """Show the rest of what a job prints; it is started where that has not happened yet."""

        fruitless = 0

        async def attempt() -> bool:
            nonlocal fruitless
            before = list(shown.offsets)
            async with self._show(job, shown, facts_file, takes_input=False) as shell:
                await shell.wait()
            self.require_accepted(shown)
            fruitless = 0 if shown.offsets > before else fruitless + 1
            if fruitless > _MOST_FRUITLESS and not shown.complete:
                message = f"sandbox {self._machine.id} does not run commands: {shown.noise}"
                hint = "the image needs bash, coreutils and a writable /tmp"
                raise SandboxError(message, hint=hint, from_inside=self.is_set_up)
            return shown.complete

        await self.persist(attempt)

    @asynccontextmanager
    async def follow(self, job: Job, shown: Shown) -> AsyncIterator[Shell]:
        """Start a job that takes input, and show what it prints for as long as the stream lasts.

        Leaving the context kills the job and all that it started.
        """
        job, facts_file = await self._hand_over(job)
        try:
            async with self._show(job, shown, facts_file, takes_input=True) as shell:
                yield shell
        finally:
            await asyncio.shield(self.abandon(job))

    async def signal(self, job: Job, number: int) -> None:
        """Send a signal to a job's whole tree."""
        await self._step(job, "signal", number)

    async def abandon(self, job: Job) -> bool:
        """Kill a job and all that it started; return whether the sandbox still answers.

        Raises DefiedError where the job does not die, SandboxLostError where the sandbox is gone.
        """
        answered = False
        if not self.ended.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._step(job, "stop")
                    answered = True
        self._forget(job)
        return answered

    async def persist(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Repeat an attempt until it says that it is done, or the sandbox is lost."""
        failing_since, failures = 0.0, 0
        while True:
            try:
                if await attempt():
                    return
                failures = 0
            except SandboxError as error:
                error.from_inside &= self.is_set_up
                if not error.retryable:
                    raise
                failing_since = failing_since if failures else time.monotonic()
                failures += 1
                await self.require_exists()
                if time.monotonic() - failing_since > _GIVE_UP_S:
                    raise SandboxLostError(
                        f"sandbox {self._machine.id} cannot be reached: {error}",
                        hint="is the provider reachable?",
                    ) from error
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    def require_accepted(self, shown: Shown) -> None:
        """Raise SandboxError where a job was refused."""
        if shown.refusal:
            message = f"sandbox {self._machine.id}: {shown.refusal}"
            hint = "raise disk_mib, or the template's disk"
            raise SandboxError(message, hint=hint, from_inside=self.is_set_up)

    async def _step(self, job: Job, step: str, number: int = 0) -> None:
        said: list[str] = []

        async def take(text: str) -> None:
            said.append(text)

        text = replace(job, argv=(), env={}, stdin=b"").step(step, number=number)

        async def attempt() -> bool:
            async with self._machine.shell(
                RUN, env={"SWERL_JOB": text}, user=job.user, takes_input=False, show=(take, take)
            ) as shell:
                await shell.wait()
            return True

        await self.persist(attempt)
        if any(line.startswith("! ") for line in "".join(said).splitlines()):
            raise DefiedError(
                f"sandbox {self._machine.id} is gone: a command could not be killed",
                hint="open a fresh sandbox",
                from_inside=True,
            )

    @asynccontextmanager
    async def _show(
        self, job: Job, shown: Shown, facts_file: str, *, takes_input: bool
    ) -> AsyncIterator[Shell]:
        shown.begin()
        stale = self._stale.pop(job.user, [])
        text = job.step("launch", offsets=shown.offsets, stale=stale, facts_file=facts_file)
        try:
            async with self._machine.shell(
                RUN,
                env={"SWERL_JOB": text},
                user=job.user,
                takes_input=takes_input,
                show=(shown.stdout, shown.stderr),
            ) as shell:
                yield shell
        except SandboxError:
            self._stale.setdefault(job.user, []).extend(stale)
            raise

    async def _hand_over(self, job: Job) -> tuple[Job, str]:
        """Put what is too long for an environment into files."""
        if len(job.stdin) > INLINE_BYTES // 2:
            path = f"{job.folder}.in"
            await self.upload(path, job.stdin, job.user)
            job = replace(job, stdin=b"", stdin_file=path)
        facts = job.facts().encode()
        if len(facts) <= INLINE_BYTES:
            return job, ""
        path = f"{job.folder}.facts"
        await self.upload(path, facts, job.user)
        return job, path

    async def upload(self, path: str, data: bytes, user: str | None) -> None:
        """Write a file through the provider, again where the connection breaks."""

        async def attempt() -> bool:
            await self._machine.write(path, data, user)
            return True

        await self.persist(attempt)

    def _forget(self, job: Job) -> None:
        paths = (job.folder, f"{job.folder}.facts", f"{job.folder}.in")
        self._stale.setdefault(job.user, []).extend(paths)

    async def require_exists(self) -> None:
        """Raise SandboxLostError where the provider says that the sandbox is gone."""
        with suppress(CutError):
            if not await self._provider.exists(self._machine.id):
                raise self._lost()

    def _lost(self) -> SandboxLostError:
        over = time.monotonic() >= self._ends_at
        why = f"its lifetime of {self._lifetime_s:g} s is over" if over else "it was killed outside"
        message = f"sandbox {self._machine.id} is gone: {why}"
        hint = "raise budgets.sandbox_s" if over else "open a fresh sandbox"
        return SandboxLostError(message, hint=hint)
