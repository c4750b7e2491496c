"""One Episode from Task to Reward: `run` reads like the path of one datum.

Every way to fail ends in a Verdict, not in an exception: a budget in `timeout`, broken machinery
in `infra`, a sandbox that what ran in it used up in `unsolved`. What was finished by then (Turns,
patch) is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from swerl.core import plugins
from swerl.core.contracts import Exit, Sandbox
from swerl.core.episode import Episode, Status
from swerl.core.errors import BrokenImageError, BudgetError, SandboxError, SwerlError
from swerl.core.events import EpisodeEnded
from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task
from swerl.gateway.sessions import Session
from swerl.rollout import workspace
from swerl.rollout.clock import Clock
from swerl.rollout.parts import Parts
from swerl.rollout.session import open_session
from swerl.rollout.shaping import penalty


@dataclass(slots=True)
class _Draft:
    """What an Episode has come to so far."""

    status: Status = Status.FAILED
    patch: str | None = None
    log: str = ""
    records: bytes = b""
    grade: Grade | None = None


async def run(task: Task, episode_id: str, parts: Parts) -> Episode:
    """Attempt a Task once: the agent in one Sandbox, grading in a fresh one."""
    draft, clock = _Draft(), Clock(episode_id, parts.emit)
    session = open_session(episode_id, parts)
    try:
        async with _budget("episode_s", parts.budgets.episode_s):
            await _work(task, session, parts, draft, clock)
            draft.grade = await _grade(task, parts, draft, clock)
    except SwerlError as error:
        draft.grade = _failed(error)
    finally:
        trajectory = await session.close()
    grade = _failed(session.failure) if session.failure else draft.grade
    assert grade is not None
    clock.seconds["total"] = clock.total
    episode = Episode(
        id=episode_id,
        task_id=task.id,
        status=draft.status,
        grade=grade,
        reward=parts.reward(grade, draft.status) - penalty(trajectory, parts.rollout),
        trajectory=trajectory,
        patch=draft.patch or "",
        timings=clock.seconds,
        log=draft.log,
        records=draft.records,
        error=grade.reason if grade.verdict is Verdict.INFRA else "",
    )
    parts.emit(_ended(episode))
    return episode


async def _work(task: Task, session: Session, parts: Parts, draft: _Draft, clock: Clock) -> None:
    """Let the agent work in a Sandbox of its own, then take its patch."""
    opened = parts.provisioner.for_agent(task, parts.harness, clock)
    async with _boot(opened, "boot", clock) as sandbox:
        start = await workspace.start(sandbox, task.workdir)
        url = await sandbox.expose(session) if parts.harness.inside else session.url
        with clock.phase("agent"):
            done = await parts.harness.run(
                sandbox, task, session.endpoint(url), parts.budgets.agent_s
            )
        draft.status = _status(done, session.limit)
        draft.log, draft.records = done.log, done.records
        with clock.phase("diff"):
            draft.patch = await workspace.take_patch(sandbox, task.workdir, start)


async def _grade(task: Task, parts: Parts, draft: _Draft, clock: Clock) -> Grade:
    """Grade the patch in a clean Sandbox, unless there is nothing left to grade."""
    if draft.status is Status.TIMEOUT:
        return Grade(Verdict.TIMEOUT, f"the agent used up agent_s = {parts.budgets.agent_s:g} s")
    if draft.patch is None:
        return Grade(Verdict.UNSOLVED, "the agent left no readable work tree, or a huge patch")
    grader = plugins.load("graders", task.grading.grader).build()
    async with _budget("grading_s", parts.budgets.grading_s), AsyncExitStack() as one:

        async def fresh() -> Sandbox:
            await one.aclose()
            return await one.enter_async_context(parts.provisioner.for_grading(task))

        with clock.phase("grade_boot"):
            sandbox = await fresh()
        with clock.phase("grade"):
            grade: Grade = await grader.grade(task, draft.patch, sandbox, fresh)
    clock.add("test", grade.test_s)
    return grade


@asynccontextmanager
async def _boot(
    opened: AbstractAsyncContextManager[Sandbox], name: str, clock: Clock
) -> AsyncIterator[Sandbox]:
    async with AsyncExitStack() as stack:
        with clock.phase(name):
            sandbox = await stack.enter_async_context(opened)
        yield sandbox


@asynccontextmanager
async def _budget(name: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise BudgetError(f"budgets.{name} = {seconds:g} s ran out") from error


def _failed(error: SwerlError) -> Grade:
    verdict = Verdict.INFRA
    if isinstance(error, BudgetError):
        verdict = Verdict.TIMEOUT
    elif isinstance(error, BrokenImageError):
        verdict = Verdict.INVALID
    elif isinstance(error, SandboxError) and error.from_inside:
        verdict = Verdict.UNSOLVED
    return Grade(verdict, f"{type(error).__name__}: {error}")


def _status(done: Exit, limit: str) -> Status:
    """Say how the harness ended; most break off when the gateway refuses them a turn."""
    if done.timed_out:
        return Status.TIMEOUT
    if done.limit or limit:
        return Status.LIMIT
    return Status.COMPLETED if done.code == 0 else Status.FAILED


def _ended(episode: Episode) -> EpisodeEnded:
    return EpisodeEnded(
        episode=episode.id,
        task=episode.task_id,
        verdict=episode.verdict,
        reward=episode.reward,
        turns=len(episode.trajectory.turns),
        tokens=episode.trajectory.num_sampled_tokens,
        seconds=episode.timings["total"],
    )
