"""Groups: n concurrent Episodes of each Task; an Episode lost to infrastructure runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from swerl.core.episode import Episode, Group
from swerl.core.events import Notice
from swerl.core.grade import Verdict
from swerl.core.task import Task
from swerl.gateway.replay import Replay
from swerl.rollout import episode, record
from swerl.rollout.parts import Parts
from swerl.runs.layout import RunFolder


async def run(
    tasks: Sequence[Task], stage: str, parts: Parts, *, size: int, folder: RunFolder
) -> list[Group]:
    """Run a Group of each Task; see `run_one`."""
    async with asyncio.TaskGroup() as running:
        groups = [
            running.create_task(run_one(task, stage, parts, size=size, folder=folder))
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
) -> Group:
    """Run `size` Episodes of a Task; `stage` names their folder under `episodes/`.

    All of them have one agent. Episodes already finished on disk are read back and not run again,
    unless infrastructure had lost them.
    """
    drawn = parts.drawn(f"{stage}/{task.id}")
    async with asyncio.TaskGroup() as running:
        episodes = [
            running.create_task(_run_recorded(task, stage, k, drawn, folder)) for k in range(size)
        ]
    agent = drawn.agent if parts.mix else ""
    return Group(task.id, tuple(each.result() for each in episodes), agent)


def id_prefix(task: Task, stage: str) -> str:
    """Return the common start of the ids of a Group's Episodes."""
    return f"{stage}/{task.id.replace('/', '_')}."


async def _run_recorded(task: Task, stage: str, k: int, parts: Parts, folder: RunFolder) -> Episode:
    name = f"{id_prefix(task, stage)}{k}"
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
            result = await run_with_refills(task, name, parts, lost_tokens=lost_tokens, log=kept)
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
) -> Episode:
    """Run an Episode, and up to `rollout.refills` times again if infrastructure loses it.

    The caller holds a slot of the provisioner. `lost_tokens` is the count of earlier attempts. The
    first attempt begins with the Turns that a crash left in `log`.
    """
    first, *refills = _attempt_names(name, parts)
    replay = None
    if log:
        parts = replace(parts, on_turn=log)
        if num_turns := len(log.recorded):
            replay = Replay(log.recorded, num_turns=num_turns, is_own=True)
            parts.emit(Notice(f"episode {name} goes on after turn {num_turns}"))
    result = await episode.run(task, first, parts, replay=replay)
    for again in refills:
        # A broken image breaks the next attempt too.
        if result.learnable or result.verdict is Verdict.INVALID:
            break
        lost_tokens += _sampled_tokens(result)
        if log:
            log.clear()
        result = await episode.run(task, again, parts)
    return replace(result, lost_tokens=lost_tokens)


def _attempt_names(name: str, parts: Parts) -> list[str]:
    return [name, *(f"{name}+{refill + 1}" for refill in range(parts.rollout.refills))]


def _sampled_tokens(lost: Episode) -> int:
    return lost.lost_tokens + lost.trajectory.num_sampled_tokens
