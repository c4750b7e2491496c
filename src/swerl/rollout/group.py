"""Groups: n Episodes of each Task at once; what the machinery lost is tried again alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from swerl.core.episode import Episode, Group
from swerl.core.grade import Verdict
from swerl.core.task import Task
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

    Episodes that are already finished on disk are read back, not run again, unless the machinery
    had lost them.
    """
    async with asyncio.TaskGroup() as running:
        attempts = [
            running.create_task(_attempt(task, stage, k, parts, folder)) for k in range(size)
        ]
    return Group(task.id, tuple(attempt.result() for attempt in attempts))


def prefix_of(task: Task, stage: str) -> str:
    """Return how the ids of all Episodes of a Group begin."""
    return f"{stage}/{task.id.replace('/', '_')}."


async def _attempt(task: Task, stage: str, k: int, parts: Parts, folder: RunFolder) -> Episode:
    name = f"{prefix_of(task, stage)}{k}"
    path = folder.episode(*name.split("/"))
    tries = [name, *(f"{name}+{refill + 1}" for refill in range(parts.rollout.refills))]
    lost_tokens = 0
    if record.is_finished(path):
        kept = record.read(path)
        if kept.learnable:
            return kept
        lost_tokens = _tokens(kept)
    async with parts.provisioner.slot:
        try:
            result = await episode.run(task, name, parts)
            for again in tries[1:]:
                if result.learnable or result.verdict is Verdict.INVALID:
                    break
                lost_tokens += _tokens(result)
                result = await episode.run(task, again, parts)
            return record.write(path, replace(result, lost_tokens=lost_tokens))
        finally:
            if spool := parts.spool:
                for each in tries:
                    spool.drop(each)


def _tokens(lost: Episode) -> int:
    """Return the tokens sampled for an Episode in this and in earlier attempts."""
    return lost.lost_tokens + lost.trajectory.num_sampled_tokens
