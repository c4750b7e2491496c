"""One Episode from Task to Reward: `run` reads like the path of one datum.

Every failure ends in a Verdict, not in an exception: an exceeded budget in `timeout`, broken
infrastructure in `infra`, a sandbox that the agent exhausted in `unsolved`, a failure of the user's
own code in `invalid`. Before the agent has asked the model once, every other failure is `infra`.
Turns and patch up to that point are kept. An unexpected exception is `infra` too, with a notice and
its traceback: a bug that one Episode meets does not end the run, and one that many meet ends it
(`step.check_losses`).
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace

from swerl.core import plugins
from swerl.core.changes import (
    MAX_PATCH_BYTES,
    AgentPatch,
    Changes,
    diff,
    touched,
    without_leftovers,
)
from swerl.core.chat import Role, ToolCall
from swerl.core.contracts import Attempt, Exit, OpenClean, Sandbox
from swerl.core.episode import Episode, Status
from swerl.core.errors import (
    BrokenImageError,
    BudgetError,
    PluginError,
    SandboxError,
    SwerlError,
    shortened,
)
from swerl.core.events import EpisodeEnded, Notice, TurnEnded
from swerl.core.grade import LEARNABLE, Grade, Verdict
from swerl.core.task import Task
from swerl.core.turn import Sampling, Trajectory, seed_of
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.sessions import Session
from swerl.rollout.parts import Clock, Parts
from swerl.rollout.reward import penalty
from swerl.tasks import worktree

_HUGE = "the agent left no readable work tree, or a huge patch"


@dataclass(slots=True)
class _Draft:
    """The results of an Episode so far."""

    status: Status = Status.FAILED
    changes: Changes | None = None
    """The agent's changes; None if they cannot be read, or are too large."""
    num_left: int = 0
    patch: str = ""
    log: str = ""
    records: bytes = b""
    grade: Grade | None = None
    fault: str = ""
    """Failure of the user's own code."""


async def run(task: Task, episode_id: str, parts: Parts) -> Episode:
    """Attempt a Task once: the agent in one Sandbox, grading in a fresh one."""
    draft, clock = _Draft(), Clock(episode_id, parts.emit)
    try:
        episode = await _attempt(task, episode_id, parts, draft, clock)
    except Exception as error:  # noqa: BLE001  the boundary: one Episode must not end the run
        # The Session failed, so there are no turns to keep.
        grade = _unexpected(error, episode_id, parts, draft)
        seconds = {**clock.seconds, "total": clock.total}
        episode = Episode(
            id=episode_id,
            task_id=task.id,
            status=Status.FAILED,
            grade=grade,
            reward=0.0,
            trajectory=Trajectory(episode_id),
            timings=seconds,
            log=draft.log,
            error=grade.reason,
            agent=parts.agent,
        )
    parts.emit(_ended_event(episode))
    return episode


async def _attempt(
    task: Task, episode_id: str, parts: Parts, draft: _Draft, clock: Clock
) -> Episode:
    session = _open_session(episode_id, parts)
    try:
        # The budget includes grading. Closing the session is outside: it must always happen.
        async with clock.budget("episode_s", parts.budgets.episode_s):
            await _run_agent(task, session, parts, draft, clock)
            draft.grade = await _grade(task, parts, draft, clock)
    except PluginError as error:
        draft.fault = str(error)
        draft.grade = Grade(Verdict.INVALID, draft.fault)
    except SwerlError as error:
        draft.grade = _failed_grade(error)
    except Exception as error:  # noqa: BLE001  the boundary: one Episode must not end the run
        draft.grade = _unexpected(error, episode_id, parts, draft)
    finally:
        trajectory = await session.close()
    # A failure of the session replaces the grade, even if a patch could be graded.
    grade = _failed_grade(session.failure) if session.failure else draft.grade
    assert grade is not None
    if grade.verdict in LEARNABLE and not session.is_used:
        # The policy has no part in it.
        grade = Grade(Verdict.INFRA, grade.reason)
    try:
        reward = _reward(task, grade, draft, trajectory, parts)
    except PluginError as error:
        draft.fault, reward = str(error), 0.0
        grade = replace(grade, verdict=Verdict.INVALID, reason=draft.fault)
    clock.seconds["total"] = clock.total
    return Episode(
        id=episode_id,
        task_id=task.id,
        status=draft.status,
        grade=grade,
        reward=reward,
        trajectory=trajectory,
        patch=draft.patch,
        num_left=draft.num_left,
        timings=clock.seconds,
        log=draft.log,
        records=draft.records,
        error=draft.fault or (grade.reason if grade.verdict is Verdict.INFRA else ""),
        agent=parts.agent,
    )


async def _run_agent(
    task: Task, session: Session, parts: Parts, draft: _Draft, clock: Clock
) -> None:
    """Run the agent in a Sandbox of its own, then take what it changed."""
    # Leaving the stack closes the Sandbox before grading opens another.
    async with AsyncExitStack() as stack:
        with clock.phase("boot"):
            hiding = clock.phase("hide_future")
            opening = parts.sandboxes.for_agent(task, parts.harness, hiding)
            prepared = await stack.enter_async_context(clock.opened(opening))
            sandbox = prepared.sandbox
        # The harness is installed already, so its files are no part of the changes.
        kept = touched(task.gold_patch)
        start = await prepared.list_start(kept=kept)
        # An agent inside a sandbox cannot use the gateway's own address.
        url = await sandbox.expose(session) if parts.harness.inside else session.url
        with clock.phase("agent"):
            endpoint, budget_s = session.endpoint(url), parts.budgets.agent_s
            with plugins.blaming("harnesses", parts.harness):
                ended = await parts.harness.run(sandbox, task, endpoint, budget_s)
        draft.status = _status(ended, session.limit)
        draft.log, draft.records = ended.log, ended.records
        if not session.is_used:
            last = first_line("\n".join(reversed(ended.log.splitlines())))
            raise SandboxError(
                f"the agent asked the model nothing (exit code {ended.code}): {last}"
            )
        with clock.phase("diff"):
            snapshot = await worktree.take(sandbox, task.workdir, start, kept=kept)
        if snapshot:
            draft.changes, draft.num_left = snapshot.changes, snapshot.num_left


async def _grade(task: Task, parts: Parts, draft: _Draft, clock: Clock) -> Grade:
    """Grade what the agent changed; without that the Grade follows from the status."""
    changes = draft.changes
    if draft.status is Status.TIMEOUT:
        # The patch is of interest even if it is not graded.
        with suppress(SwerlError):
            if changes and changes.files:
                async with clock.opened(parts.sandboxes.for_grading(task)) as prepared:
                    await _compared(prepared.compare(changes), draft, clock)
        return Grade(Verdict.TIMEOUT, f"the agent used up agent_s = {parts.budgets.agent_s:g} s")
    if changes is None:
        return Grade(Verdict.UNSOLVED, _HUGE)
    grade = await grade_patch(task, changes, parts, clock, draft=draft)
    clock.add("test", grade.test_s)
    return grade


async def grade_patch(
    task: Task, patch: AgentPatch, parts: Parts, clock: Clock, *, draft: _Draft | None = None
) -> Grade:
    """Grade a patch in clean Sandboxes that the Grader opens, within `budgets.grading_s`.

    The canonical diff of Changes is kept in the draft. Raises SwerlError.
    """
    grader = plugins.load("graders", task.grading.grader).build()
    draft = draft or _Draft()
    async with (
        clock.budget("grading_s", parts.budgets.grading_s),
        AsyncExitStack() as first,
    ):
        opening = clock.opened(parts.sandboxes.for_grading(task))
        with clock.phase("grade_boot"):
            opened = await first.enter_async_context(opening)
        if isinstance(patch, Changes):
            compared = await _compared(opened.compare(patch), draft, clock)
            if compared is None:
                return Grade(Verdict.UNSOLVED, _HUGE)
            patch = compared
        text = draft.patch if isinstance(patch, Changes) else patch
        open_clean = _opener(task, parts, clock, [(first, opened.sandbox)])
        with clock.phase("grade"), plugins.blaming("graders", grader):
            return await parts.audit.grade(grader, task, patch, open_clean, text=text)


async def confirm(episode: Episode, task: Task, parts: Parts) -> Episode:
    """Confirm a solved Episode that no audit has confirmed."""
    grader = plugins.load("graders", task.grading.grader).build()
    clock = Clock(episode.id, parts.emit)
    open_clean = _opener(task, parts, clock, [])
    try:
        async with clock.budget("grading_s", parts.budgets.grading_s):
            grade = await parts.audit.confirm(
                grader, task, episode.patch, open_clean, grade=episode.grade
            )
    except SwerlError as error:
        grade = _failed_grade(error)
    attempt = Attempt(task, grade, episode.status, episode.patch, episode.trajectory)
    reward = parts.reward(attempt) - penalty(episode.trajectory, episode.status, parts.rollout)
    return replace(episode, grade=grade, reward=reward)


def _opener(
    task: Task, parts: Parts, clock: Clock, opened: list[tuple[AsyncExitStack, Sandbox]]
) -> OpenClean:
    """Return a function that opens clean Sandboxes, first those that are open already."""
    alone = asyncio.Semaphore(1)

    @asynccontextmanager
    async def open_clean() -> AsyncIterator[Sandbox]:
        # The Episode's slot covers one sandbox; others run beside it only in free slots.
        slot = parts.sandboxes.slot
        async with slot if alone.locked() and not slot.locked() else alone:
            if opened:
                first, sandbox = opened.pop()
                async with first:
                    yield sandbox
            else:
                async with clock.opened(parts.sandboxes.for_grading(task)) as prepared:
                    with clock.phase("confirm"):
                        yield prepared.sandbox

    return open_clean


async def _compared(
    comparing: Awaitable[Changes | None], draft: _Draft, clock: Clock
) -> Changes | None:
    """Await Changes compared with a clean tree, keep their diff; None if either is too large."""
    with clock.phase("diff"):
        compared = await comparing
        if compared is None:
            return None
        bounded = await asyncio.to_thread(without_leftovers, compared)
        patch = await asyncio.to_thread(diff, bounded)
    if len(patch) > MAX_PATCH_BYTES:
        return None
    draft.patch = patch
    draft.num_left += len(compared.files) - len(bounded.files)
    return bounded


def _failed_grade(error: SwerlError) -> Grade:
    verdict = Verdict.INFRA
    if isinstance(error, BudgetError):
        verdict = Verdict.TIMEOUT
    elif isinstance(error, BrokenImageError):
        verdict = Verdict.INVALID
    elif isinstance(error, SandboxError) and error.from_inside:
        verdict = Verdict.UNSOLVED
    return Grade(verdict, f"{type(error).__name__}: {error}")


def _unexpected(error: Exception, episode_id: str, parts: Parts, draft: _Draft) -> Grade:
    """Return the Grade of an Episode that met a bug, and report the bug."""
    text = "".join(traceback.format_exception(error))
    draft.log = f"{draft.log}\n{text}".lstrip("\n")
    brief = first_line(f"{type(error).__name__}: {error}")
    if isinstance(error, SwerlError) and error.hint:
        brief = f"{brief}; {error.hint}"
    parts.emit(Notice(f"episode {episode_id} met a bug, and its log has the traceback: {brief}"))
    return Grade(Verdict.INFRA, f"an unexpected error: {brief}")


def _status(exit: Exit, limit: str) -> Status:
    if exit.timed_out:
        return Status.TIMEOUT
    # Most harnesses end with an error when the gateway refuses a turn: the limit decides.
    if exit.limit or limit:
        return Status.LIMIT
    return Status.COMPLETED if exit.code == 0 else Status.FAILED


def _ended_event(episode: Episode) -> EpisodeEnded:
    return EpisodeEnded(
        episode=episode.id,
        task=episode.task_id,
        verdict=episode.verdict,
        reward=episode.reward,
        turns=len(episode.trajectory.turns),
        tokens=episode.trajectory.num_sampled_tokens,
        seconds=episode.timings["total"],
        agent=episode.agent,
    )


def _reward(task: Task, grade: Grade, draft: _Draft, trajectory: Trajectory, parts: Parts) -> float:
    attempt = Attempt(task, grade, draft.status, draft.patch, trajectory)
    return parts.reward(attempt) - penalty(trajectory, draft.status, parts.rollout)


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
                output_tokens=len(turn.output_ids) + turn.num_reported,
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
    return shortened(line, width)
