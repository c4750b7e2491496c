"""Run jobs (commands) in one sandbox, over provider streams that may break.

A supervisor in the sandbox (`job.sh`) runs each job and keeps its output, so a new stream continues
where a broken one stopped.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Chunk
from swerl.sandboxes._e2b.sdk import CutError, E2BProvider, RemoteSandbox, ShellStream

T = TypeVar("T")

_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses between attempts to resume a broken stream; the last repeats."""
_GIVE_UP_S = 60.0
"""Seconds of failed attempts after which a sandbox is lost."""
_STOP_TIMEOUT_S = 20.0
_MAX_FRUITLESS = 2
"""Complete streams in a row without new output; after more, the image lacks a program."""
RUN = 'eval "$SWERL_JOB"'
"""The provider's shell command. The script is in the environment: no command line shows it."""
INLINE_BYTES = 60_000
"""Largest text in the environment; the kernel's limit is 128 KiB for one variable."""
_REPORT = re.compile(r"x (\d+) ([01]) (\d+) (\d+)")


_GRACE_S = 60.0
"""Seconds beyond a sandbox's lifetime in which its provider has to report the end."""


class UnkillableError(SandboxLostError):
    """The sandbox answers, but a command in it cannot be killed."""


class Runner:
    """Runs jobs in one sandbox."""

    def __init__(self, provider: E2BProvider, remote: RemoteSandbox, lifetime_s: float) -> None:
        self._provider = provider
        self._remote = remote
        self._lifetime_s = lifetime_s
        self._ends_at = time.monotonic() + lifetime_s
        self._stale: dict[str | None, list[str]] = {}
        """Folders of ended jobs, by the user who may remove them."""
        self.ended: asyncio.Future[SandboxLostError] = asyncio.get_running_loop().create_future()
        """Set when the sandbox is lost, to the reason."""
        # Also if the provider answers nothing any more: a stopped server keeps its connections.
        late = self.ended.get_loop().call_later(
            lifetime_s + _GRACE_S, lambda: self.lose(self._lost())
        )
        self.ended.add_done_callback(lambda _: late.cancel())
        self.is_set_up = False
        """Whether the image can run commands. Later failures come from inside."""

    def lose(self, error: SandboxLostError) -> None:
        """Make all running and future requests fail with this error."""
        if not self.ended.done():
            self.ended.set_result(error)

    async def unless_lost(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of `work`. Raises SandboxLostError as soon as the sandbox is lost."""
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

    async def finish(self, job: ShellJob, output: JobOutput) -> JobResult:
        """Run a job until it has ended and all of its output is read.

        Raises SandboxLostError, and SandboxError if it cannot start.
        """
        job, facts_file = await self._upload_large(job)
        await self.resume(job, output, facts_file)
        self._forget(job)
        assert output.result is not None
        return output.result

    async def resume(self, job: ShellJob, output: JobOutput, facts_file: str = "") -> None:
        """Read the rest of a job's output; start the job first if it has not started."""

        fruitless = 0

        async def attempt() -> bool:
            nonlocal fruitless
            before = list(output.offsets)
            async with self._stream(job, output, facts_file, accepts_input=False) as shell:
                await shell.wait()
            self.require_accepted(output)
            fruitless = 0 if output.offsets > before else fruitless + 1
            if fruitless > _MAX_FRUITLESS and not output.complete:
                message = f"sandbox {self._remote.id} does not run commands: {output.noise}"
                hint = "the image needs bash, coreutils and a writable /tmp"
                raise SandboxError(message, hint=hint, from_inside=self.is_set_up)
            return output.complete

        await self.persist(attempt)

    @asynccontextmanager
    async def follow(self, job: ShellJob, output: JobOutput) -> AsyncIterator[ShellStream]:
        """Start a job that accepts input, and read its output as long as the stream lasts.

        Leaving the context kills the job and all processes that it started.
        """
        job, facts_file = await self._upload_large(job)
        try:
            async with self._stream(job, output, facts_file, accepts_input=True) as shell:
                yield shell
        finally:
            await asyncio.shield(self.abandon(job))

    async def signal(self, job: ShellJob, number: int) -> None:
        await self._step(job, "signal", number)

    async def abandon(self, job: ShellJob) -> bool:
        """Kill a job and all processes that it started; return whether the sandbox still answers.

        Raises UnkillableError if the job does not die, and SandboxLostError if the sandbox is gone.
        """
        answered = False
        if not self.ended.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._step(job, "stop")
                    answered = True
        self._forget(job)
        return answered

    async def tidy(self, *, but: str | None = "") -> None:
        """Remove the folders of ended jobs now, except for those of one user."""
        for user in [user for user in self._stale if user != but]:
            stale = self._stale.pop(user)
            await self._step(ShellJob((), "/", {}, user), "tidy", stale=stale)

    async def persist(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Repeat an attempt until it returns True, or the sandbox is lost."""
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
                        f"sandbox {self._remote.id} cannot be reached: {error}",
                        hint="check that the provider is reachable",
                    ) from error
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    def require_accepted(self, output: JobOutput) -> None:
        if output.refusal:
            message = f"sandbox {self._remote.id}: {output.refusal}"
            hint = "raise disk_mib, or the template's disk"
            raise SandboxError(message, hint=hint, from_inside=self.is_set_up)

    async def _step(
        self, job: ShellJob, step: str, number: int = 0, stale: Sequence[str] = ()
    ) -> None:
        detail: list[str] = []

        async def take(text: str) -> None:
            detail.append(text)

        text = replace(job, argv=(), env={}, stdin=b"").step(step, number=number, stale=stale)

        async def attempt() -> bool:
            async with self._remote.shell(
                RUN, env={"SWERL_JOB": text}, user=job.user, accepts_input=False, show=(take, take)
            ) as shell:
                await shell.wait()
            return True

        await self.persist(attempt)
        if any(line.startswith("! ") for line in "".join(detail).splitlines()):
            raise UnkillableError(
                f"sandbox {self._remote.id} is gone: a command could not be killed",
                hint="open a new sandbox",
                from_inside=True,
            )

    @asynccontextmanager
    async def _stream(
        self, job: ShellJob, output: JobOutput, facts_file: str, *, accepts_input: bool
    ) -> AsyncIterator[ShellStream]:
        output.begin()
        stale = self._stale.pop(job.user, [])
        text = job.step("launch", offsets=output.offsets, stale=stale, facts_file=facts_file)
        try:
            async with self._remote.shell(
                RUN,
                env={"SWERL_JOB": text},
                user=job.user,
                accepts_input=accepts_input,
                show=(output.stdout, output.stderr),
            ) as shell:
                yield shell
        except SandboxError:
            self._stale.setdefault(job.user, []).extend(stale)
            raise

    async def _upload_large(self, job: ShellJob) -> tuple[ShellJob, str]:
        """Upload parts of a job that are too large for the environment."""
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
        """Write a file through the provider, and retry if the connection breaks."""

        async def attempt() -> bool:
            await self._remote.write(path, data, user)
            return True

        await self.persist(attempt)

    def _forget(self, job: ShellJob) -> None:
        paths = (job.folder, f"{job.folder}.facts", f"{job.folder}.in")
        self._stale.setdefault(job.user, []).extend(paths)

    async def require_exists(self) -> None:
        """Raise SandboxLostError if the provider reports that the sandbox is gone."""
        with suppress(CutError):
            if not await self._provider.exists(self._remote.id):
                raise self._lost()

    def _lost(self) -> SandboxLostError:
        over = time.monotonic() >= self._ends_at
        why = f"its lifetime of {self._lifetime_s:g} s is over" if over else "it was killed outside"
        message = f"sandbox {self._remote.id} is gone: {why}"
        hint = "raise budgets.sandbox_s" if over else "open a new sandbox"
        return SandboxLostError(message, hint=hint)


def new_folder() -> str:
    """Return an unused path in the sandbox."""
    return f"/tmp/.swerl-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class ShellJob:
    """A command, as its supervisor in the sandbox receives it."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    user: str | None
    limit_s: float | None = None
    cap_bytes: int = 0
    """Largest number of bytes kept of each stream; 0 keeps all."""
    live: bool = False
    """Whether it accepts input, and its output is read while it runs."""
    stdin: bytes = b""
    stdin_file: str = ""
    """File in the sandbox with its input, if the input is large."""
    folder: str = field(default_factory=new_folder)

    def facts(self) -> str:
        """Return the settings of the command that are the same for all steps."""
        limit = "" if self.limit_s is None else f"{max(self.limit_s, 0.001):.3f}"
        given = [f"{name}={value}" for name, value in self.env.items()]
        inline = "" if self.stdin_file else base64.b64encode(self.stdin).decode()
        return "\n".join(
            (
                f"d={self.folder} limit={limit} cap_kib={-(-self.cap_bytes // 1024)}",
                f"live={'1' if self.live else ''} cwd={shlex.quote(self.cwd)}",
                f"file={shlex.quote(self.stdin_file)} input={inline}",
                f"argv={_array(self.argv)} given={_array(given)}",
            )
        )

    def step(
        self,
        step: str,
        *,
        offsets: Sequence[int] = (0, 0),
        stale: Sequence[str] = (),
        number: int = 0,
        facts_file: str = "",
    ) -> str:
        """Return the script of a step; `facts_file` contains the facts if they are long."""
        facts = f". {facts_file}" if facts_file else self.facts()
        head = f"step={step} offsets=({offsets[0]} {offsets[1]}) number={number}"
        return f"{facts}\n{head} stale={_array(stale)}\n{_program()}"


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a command, and the sizes of its output."""

    exit_code: int
    stopped: bool
    sizes: tuple[int, int]


class JobOutput:
    """Parses a job's output, over several streams if streams break."""

    def __init__(self, take: Callable[[Chunk], Awaitable[None]]) -> None:
        self._take = take
        self.launched = asyncio.Event()
        """Set when the command has started, or was refused."""
        self.begin()
        self.offsets = [0, 0]
        """Bytes read of standard output and of standard error."""
        self.refusal = ""
        self.noise = ""
        """The last text that was not part of a job's output."""

    @property
    def complete(self) -> bool:
        """True if the command has ended and all of its output is read."""
        return self.result is not None and self.result.sizes == tuple(self.offsets)

    def begin(self) -> None:
        self._partial = ["", ""]
        self._begun = [False, False]
        self.result: JobResult | None = None

    async def stdout(self, text: str) -> None:
        await self._read(0, text)

    async def stderr(self, text: str) -> None:
        await self._read(1, text)

    async def _read(self, stream: int, text: str) -> None:
        *lines, self._partial[stream] = (self._partial[stream] + text).split("\n")
        for line in lines:
            if not self._begun[stream]:
                self._begun[stream] = line == "="
                self.noise = (self.noise + line)[-300:]
                if self._begun[0]:
                    self.launched.set()
            elif stream == 0 and line[:2] in ("x ", "! "):
                self._conclude(line)
            elif data := _decode(line):
                self.offsets[stream] += len(data)
                await self._take(Chunk(data, is_stderr=stream == 1))

    def _conclude(self, line: str) -> None:
        match = _REPORT.fullmatch(line)
        if match:
            code, stopped, out, err = map(int, match.groups())
            self.result = JobResult(code, bool(stopped), (out, err))
        else:
            self.refusal = line[2:]


def _decode(line: str) -> bytes:
    """Decode a line, or the received part of a cut one; an error text of a shell decodes to b""."""
    try:
        return base64.b64decode(line[: len(line) // 4 * 4], validate=True)
    except binascii.Error:
        return b""


def _array(words: Sequence[str]) -> str:
    return f"({' '.join(map(shlex.quote, words))})"


@cache
def _program() -> str:
    return files("swerl.sandboxes._e2b").joinpath("job.sh").read_text()
