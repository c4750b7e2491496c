"""One trial: an agent in a sandbox of its own, a case, a family, and the Row that comes of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from swerl.checks.compat.agents import Agent
from swerl.checks.compat.cases import Case, End
from swerl.checks.compat.door import door_to
from swerl.checks.compat.ear import Ear
from swerl.checks.compat.model import PROMPT, Model
from swerl.checks.compat.row import Figures, Outcome, Row, measure
from swerl.checks.compat.watched import Watched
from swerl.core.contracts import Exit, Family, Harness, SandboxBackend
from swerl.core.errors import (
    GatewayError,
    ImageError,
    InputError,
    Refusal,
    SandboxError,
    SwerlError,
)
from swerl.core.sandbox import Limits
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Sampling
from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.gateway.sessions import Session

BUDGET_S = 180.0
"""Seconds for the agent: the slowest needs 25 for a script, more on a busy machine."""
_WORKDIR = "/repo"
_MOST_REPLY_TOKENS = 4096
_LIMITS = Limits(memory_mib=4096, num_processes=512, num_cpus=2.0, lifetime_s=2 * BUDGET_S)
_LOG_CHARS = 2000
_NO_ERRANDS = {"main", "after"}
"""Conversations that are no sub-agent's."""
_ALL_TRAINED = 0.999
_REPOSITORY = {"README.md": "# A repository to look around in\n", "notes.txt": "one\ntwo\n"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell of the lab's table."""

    agent: Agent
    case: Case
    family: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a trial left behind."""

    exit: Exit
    model: Model
    limit: bool
    """Whether the context limit refused a request or cut a reply."""
    figures: Figures


async def run(trial: Trial, family: Family, backend: SandboxBackend) -> Row:
    """Let the agent play the case. Whatever goes wrong is a row that says so."""
    row = Row(trial.agent.name, trial.case.name, trial.family, Outcome.CANNOT)
    if not trial.agent.can(trial.case.needs):
        return replace(row, reason=f"it has no {trial.case.needs} that the lab can bring about")
    try:
        harness = await asyncio.to_thread(trial.agent.build, trial.case)
    except ImageError as error:
        return replace(row, reason=f"not fetched: {error}")
    except InputError as error:
        # a release that refuses what the case needs has no such thing
        outcome = Outcome.CANNOT if trial.case.needs else Outcome.FAILED
        return replace(row, outcome=outcome, reason=str(error))
    started = time.monotonic()
    try:
        with _repository() as folder:
            seen = await _play(harness, trial.case, family, backend, folder)
    except SwerlError as error:
        reason = f"{type(error).__name__}: {error}"
        return replace(row, outcome=Outcome.FAILED, reason=reason)
    return _judge(replace(row, seconds=time.monotonic() - started), trial.case, seen)


async def _play(
    harness: Harness, case: Case, family: Family, backend: SandboxBackend, folder: Path
) -> _Seen:
    ear = Ear(family)
    refused: list[Exception] = []
    *_, last = harness.script((), _WORKDIR)
    model = Model(case, ear, closing=last.tool_calls)
    task = _task(f"dir:{folder}")
    opened = backend.open(task.image, _LIMITS, workdir=_WORKDIR, mounts=harness.mounts())
    async with (
        Gateway(
            engine=model, family=ear, on_refused=lambda _, error: refused.append(error)
        ) as gateway,
        _session(gateway, case) as session,
        door_to(session) as door,
        opened as sandbox,
    ):
        watched = Watched(sandbox)
        await watched.prepare()
        await harness.install(watched)
        url = await watched.expose(door) if harness.inside else await door.listen()
        done = await harness.run(watched, task, session.endpoint(url), BUDGET_S)
        outside = await watched.attempts() if harness.inside else None
        trajectory = await session.close()
        figures = measure(trajectory, door.requests, num_needed=model.num_needed, outside=outside)
        limit = done.limit or any(map(_is_over_context, refused))
        return _Seen(done, model, limit, figures)


def _is_over_context(error: Exception) -> bool:
    return isinstance(error, GatewayError) and error.refusal is Refusal.CONTEXT


@asynccontextmanager
async def _session(gateway: Gateway, case: Case) -> AsyncIterator[Session]:
    session = gateway.open(
        "lab",
        sampling=Sampling(max_new_tokens=_MOST_REPLY_TOKENS),
        limits=SessionLimits(max_context_tokens=case.max_context_tokens),
    )
    try:
        yield session
    finally:
        await session.close()


def _judge(row: Row, case: Case, seen: _Seen) -> Row:
    """Say how the trial ended, and whether that is what the case allows."""
    row = replace(row, figures=seen.figures)
    if seen.model.lacks:
        return replace(row, outcome=Outcome.CANNOT, reason=seen.model.lacks)
    outcome, problem = _end(seen), _problem(case, seen)
    if problem or outcome not in {Outcome(end) for end in case.ends}:
        reason = problem or f"it ended as `{outcome}`, exit code {seen.exit.code}"
        log = seen.exit.log[-_LOG_CHARS:]
        return replace(row, outcome=Outcome.FAILED, reason=reason, log=log)
    return replace(row, outcome=outcome)


def _end(seen: _Seen) -> Outcome:
    if seen.model.finished and seen.exit.code == 0:
        return Outcome.DONE
    return Outcome.LIMIT if seen.limit else Outcome.GAVE_UP


def _problem(case: Case, seen: _Seen) -> str:
    figures = seen.figures
    if seen.exit.timed_out:
        return f"it was not done within {BUDGET_S:g} s"
    if not figures.turns:
        return f"no reply reached it, exit code {seen.exit.code}"
    played = {place.conversation for place in seen.model.answered}
    if idle := sorted(case.moves.keys() - played - _NO_ERRANDS):
        return f"no sub-agent was heard of: {', '.join(idle)}"
    if End.LIMIT in case.ends and not seen.limit:
        return "the context limit was never reached"
    if figures.trained < _ALL_TRAINED:
        return f"only {figures.trained:.1%} of the sampled tokens are trained"
    return ""


def _task(image: str) -> Task:
    spec = GradingSpec(grader="command", test_command="true")
    return Task("lab", "lab", image, _WORKDIR, PROMPT, spec)


@contextmanager
def _repository() -> Iterator[Path]:
    """Make a small repository with one commit. Raises SandboxError where git is missing."""
    folder = Path(tempfile.mkdtemp(prefix="swerl-lab-"))
    try:
        folder.chmod(0o755)
        for name, text in _REPOSITORY.items():
            (folder / name).write_text(text)
        who = ("-c", "user.name=lab", "-c", "user.email=lab@localhost")
        for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "base")):
            subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
        yield folder
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"cannot make a repository for the lab: {error}", hint="install git"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
