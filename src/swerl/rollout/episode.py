"""One Episode from Task to Reward: `run` reads like the path of one datum.

Every failure ends in a Verdict, not in an exception: an exceeded budget in `timeout`, broken
infrastructure in `infra`, a sandbox that the agent exhausted in `unsolved`. Turns and patch up to
that point are kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from swerl.core import plugins
from swerl.core.chat import Role, ToolCall
from swerl.core.contracts import Exit, Sandbox
from swerl.core.episode import Episode, Status
from swerl.core.errors import BrokenImageError, BudgetError, SandboxError, SwerlError
from swerl.core.events import EpisodeEnded, TurnEnded
from swerl.core.grade import Grade, Verdict
from swerl.core.seeds import seed_of
from swerl.core.task import Task
from swerl.core.turn import Sampling
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.sessions import Session
from swerl.rollout import workspace
from swerl.rollout.parts import Clock, Parts
from swerl.rollout.reward import penalty


@dataclass(slots=True)
class _Draft:
    """The results of an Episode so far."""

    status: Status = Status.FAILED
    patch: str | None = None
    log: str = ""
    records: bytes = b""
    grade: Grade | None = None


async def run(task: Task, episode_id: str, parts: Parts) -> Episode:
    """Attempt a Task once: the agent in one Sandbox, grading in a fresh one."""
    draft, clock = _Draft(), Clock(episode_id, parts.emit)
    session = _open_session(episode_id, parts)
    try:
        # The budget includes grading. Closing the session is outside: it must always happen.
        async with _budget("episode_s", parts.budgets.episode_s):
            await _run_agent(task, session, parts, draft, clock)
            draft.grade = await _grade(task, parts, draft, clock)
    except SwerlError as error:
        draft.grade = _failed_grade(error)
    finally:
        trajectory = await session.close()
    # A failure of the session replaces the grade, even if a patch could be graded.
    grade = _failed_grade(session.failure) if session.failure else draft.grade
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
    parts.emit(_ended_event(episode))
    return episode


async def _run_agent(
    task: Task, session: Session, parts: Parts, draft: _Draft, clock: Clock
) -> None:
    """Run the agent in a Sandbox of its own, then take its patch."""
    # Leaving the stack closes the Sandbox before grading opens another.
    async with AsyncExitStack() as stack:
        with clock.phase("boot"):
            opened = parts.provisioner.for_agent(task, parts.harness, clock)
            sandbox = await stack.enter_async_context(opened)
        # The harness is installed already, so its files are no part of the patch.
        start = await workspace.start(sandbox, task.workdir)
        # An agent inside a sandbox cannot use the gateway's own address.
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
    """Grade the draft's patch; without one the Grade follows from the status."""
    if draft.status is Status.TIMEOUT:
        return Grade(Verdict.TIMEOUT, f"the agent used up agent_s = {parts.budgets.agent_s:g} s")
    if draft.patch is None:
        return Grade(Verdict.UNSOLVED, "the agent left no readable work tree, or a huge patch")
    async with _budget("grading_s", parts.budgets.grading_s):
        grade = await grade_patch(task, draft.patch, parts, clock)
    clock.add("test", grade.test_s)
    return grade


async def grade_patch(task: Task, patch: str, parts: Parts, clock: Clock) -> Grade:
    """Grade a patch in a clean Sandbox; the Grader may ask for another one. Raises SwerlError."""
    grader = plugins.load("graders", task.grading.grader).build()
    async with AsyncExitStack() as stack:

        async def fresh() -> Sandbox:
            # The earlier Sandbox goes first: a slot of the provisioner covers one at a time.
            await stack.aclose()
            return await stack.enter_async_context(parts.provisioner.for_grading(task))

        with clock.phase("grade_boot"):
            sandbox = await fresh()
        with clock.phase("grade"):
            grade: Grade = await grader.grade(task, patch, sandbox, fresh)
    return grade


@asynccontextmanager
async def _budget(name: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as timer:
            yield
    except TimeoutError as error:
        # Another timer raised the error, inside the block.
        if not timer.expired():
            raise
        raise BudgetError(f"budgets.{name} = {seconds:g} s ran out") from error


def _failed_grade(error: SwerlError) -> Grade:
    verdict = Verdict.INFRA
    if isinstance(error, BudgetError):
        verdict = Verdict.TIMEOUT
    elif isinstance(error, BrokenImageError):
        verdict = Verdict.INVALID
    elif isinstance(error, SandboxError) and error.from_inside:
        verdict = Verdict.UNSOLVED
    return Grade(verdict, f"{type(error).__name__}: {error}")


def _status(done: Exit, limit: str) -> Status:
    if done.timed_out:
        return Status.TIMEOUT
    # Most harnesses end with an error when the gateway refuses a turn: the limit decides.
    if done.limit or limit:
        return Status.LIMIT
    return Status.COMPLETED if done.code == 0 else Status.FAILED


def _ended_event(episode: Episode) -> EpisodeEnded:
    return EpisodeEnded(
        episode=episode.id,
        task=episode.task_id,
        verdict=episode.verdict,
        reward=episode.reward,
        turns=len(episode.trajectory.turns),
        tokens=episode.trajectory.num_sampled_tokens,
        seconds=episode.timings["total"],
    )


def _open_session(episode_id: str, parts: Parts) -> Session:
    rollout = parts.rollout
    return parts.gateway.open(
        episode_id,
        sampling=Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            # A refill has another id, so it samples with another seed.
            seed=seed_of(parts.seed, episode_id),
        ),
        limits=SessionLimits(
            max_turns=rollout.max_turns,
            max_context_tokens=rollout.max_context_tokens,
            model_call_s=parts.budgets.model_call_s,
        ),
        on_turn=_turn_emitter(episode_id, parts),
    )


def _turn_emitter(episode_id: str, parts: Parts) -> Callable[[TurnRecord], None]:
    def on_turn(record: TurnRecord) -> None:
        if parts.on_turn:
            parts.on_turn(record)
        turn = record.turn
        message = record.reply.message
        parts.emit(
            TurnEnded(
                episode=episode_id,
                turn=turn.index,
                prompt_tokens=record.reply.usage.prompt_tokens,
                output_tokens=len(turn.output_ids),
                seconds=turn.duration_s,
                said=first_line(message.text),
                calls=tuple(map(brief, message.tool_calls)),
                results=tuple(
                    first_line(m.text) for m in record.new_messages if m.role is Role.TOOL
                ),
            )
        )

    return on_turn


def brief(call: ToolCall) -> str:
    """Return a tool call in one line, as `name(arguments)`."""
    return f"{call.name}({first_line(json.dumps(dict(call.arguments), ensure_ascii=False))})"


def first_line(text: str, width: int = 200) -> str:
    """Return the first line that is not blank, cut at `width`."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 1] + "…"
