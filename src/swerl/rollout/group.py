"""Groups: n concurrent Episodes of each Task; an Episode lost to infrastructure runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from swerl.core.episode import Episode, Group
from swerl.core.errors import SandboxLostError
from swerl.core.events import Notice
from swerl.core.grade import Verdict
from swerl.core.task import Task
from swerl.gateway.replay import Replay
from swerl.rollout import episode, record
from swerl.rollout.parts import Parts
from swerl.rollout.prefix import ChosenPrefix, PrefixGroup, num_forked
from swerl.runs.layout import RunFolder


async def run(
    tasks: Sequence[Task],
    stage: str,
    parts: Parts,
    *,
    size: int,
    folder: RunFolder,
    may_fork: bool = False,
) -> list[Group]:
    """Run a Group of each Task; see `run_one`."""
    async with asyncio.TaskGroup() as running:
        groups = [
            running.create_task(
                run_one(task, stage, parts, size=size, folder=folder, may_fork=may_fork)
            )
            for task in tasks
        ]
    return [group.result() for group in groups]


async def run_one(
    task: Task,
    stage: str,
    parts: Parts,
    *,
    size: int,
    folder: RunFolder,
    may_fork: bool = False,
) -> Group:
    """Run `size` Episodes of a Task; `stage` names their folder under `episodes/`.

    All of them have one agent. Episodes already finished on disk are read back and not run again,
    unless infrastructure had lost them. With `may_fork`, those that `rollout.prefix` chooses begin
    after the others have ended.
    """
    drawn, section = parts.drawn(f"{stage}/{task.id}"), parts.rollout.prefix

    async def attempt(numbers: range, prefix: ChosenPrefix | None = None) -> list[Episode]:
        async with asyncio.TaskGroup() as running:
            episodes = [
                running.create_task(_run_recorded(task, f"{named}{k}", drawn, folder, prefix))
                for k in numbers
            ]
        return [each.result() for each in episodes]

    named = id_prefix(task, stage)
    first = size - num_forked(section, size) if may_fork else size
    episodes = await attempt(range(first))
    if first < size:
        own = PrefixGroup(folder, stage, _in_names(task), drawn.agent, size, parts.seed)
        prefix = await asyncio.to_thread(own.choose, episodes, section)
        episodes += await attempt(range(first, size), prefix)
    return Group(task.id, tuple(episodes), drawn.agent if parts.mix else "")


def id_prefix(task: Task, stage: str) -> str:
    """Return the common start of the ids of a Group's Episodes."""
    return f"{stage}/{_in_names(task)}."


def _in_names(task: Task) -> str:
    return task.id.replace("/", "_")


async def _run_recorded(
    task: Task, name: str, parts: Parts, folder: RunFolder, prefix: ChosenPrefix | None
) -> Episode:
    path = folder.episode(*name.split("/"))
    lost_tokens = 0
    # A finished Episode needs no slot; one that was lost runs again.
    if record.is_finished(path):
        earlier = record.read(path)
        if earlier.learnable:
            return earlier
        lost_tokens = _sampled_tokens(earlier)
    async with parts.provisioner.slot:
        try:
            log = record.TurnLog(path)
            kept = log if parts.rollout.resume_turns else None
            if kept is None:
                log.clear()
            result = await run_with_refills(
                task, name, parts, lost_tokens=lost_tokens, log=kept, prefix=prefix
            )
            written = record.write(path, result)
            log.clear()
            return written
        finally:
            # Written experts are in the Episode's folder; those of lost attempts are not needed.
            if spool := parts.spool:
                for each in _attempt_names(name, parts):
                    spool.drop(each)


async def run_with_refills(
    task: Task,
    name: str,
    parts: Parts,
    *,
    lost_tokens: int = 0,
    log: record.TurnLog | None = None,
    prefix: ChosenPrefix | None = None,
) -> Episode:
    """Run an Episode, and up to `rollout.refills` times again if infrastructure loses it.

    The caller holds a slot of the provisioner. `lost_tokens` is the count of earlier attempts. An
    attempt begins with the Turns that a crash or a lost sandbox left in `log`. Others begin with
    `prefix`, until one sends other requests.
    """
    for attempt in (attempts := _attempt_names(name, parts)):
        own = _own_replay(log, prefix) if log else None
        if own and log:
            parts.emit(Notice(f"episode {name} goes on after turn {len(log.recorded)}"))
            # An attempt that has left the prefix does not come back to it.
            prefix = prefix if log.recorded[0].turn.replayed else None
        replay = own or (prefix.replay() if prefix else None)
        logged = replace(parts, on_turn=log) if log else parts
        result = await episode.run(task, attempt, logged, replay=replay)
        # A broken image breaks the next attempt too.
        if result.learnable or result.verdict is Verdict.INVALID:
            break
        # A lost sandbox is no fault of the record.
        why = replay.problem if replay and replay.problem in result.error else ""
        if prefix and replay is not own and why:
            parts.emit(Notice(f"episode {name} starts again without its prefix: {why}"))
            prefix = None
        if attempt == attempts[-1]:
            break
        # The Turns of a lost sandbox are repeated. An attempt without a Turn has changed nothing.
        is_lost = result.error.startswith(SandboxLostError.__name__)
        if log and not why and (is_lost or not result.trajectory.turns):
            log = log.reopened()
        else:
            lost_tokens += _sampled_tokens(result)
            if log:
                log.clear()
    differences = dict(replay.differences) if replay else {}
    fork = replace(prefix.fork, differences=differences) if prefix else None
    return replace(result, lost_tokens=lost_tokens, fork=fork)


def _own_replay(log: record.TurnLog, prefix: ChosenPrefix | None) -> Replay | None:
    """Return a Replay of an interrupted Episode's Turns; None, and no Turns, if it has no own."""
    is_forked = any(each.turn.replayed for each in log.recorded[:1])
    if is_forked and not (prefix and prefix.begins(log.recorded)):
        log.clear()
    if not log.recorded:
        return None
    return Replay(log.recorded, num_turns=len(log.recorded), is_own=True)


def _attempt_names(name: str, parts: Parts) -> list[str]:
    return [name, *(f"{name}+{refill + 1}" for refill in range(parts.rollout.refills))]


def _sampled_tokens(lost: Episode) -> int:
    return lost.lost_tokens + lost.trajectory.num_sampled_tokens
