"""Groups: n Episodes of each Task at once; what the machinery lost is tried again alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swerl.episode import Episode, Group
from swerl.grade import Verdict
from swerl.rollout import episode, record
from swerl.rollout.parts import Parts
from swerl.run.layout import RunFolder
from swerl.task import Task


async def run(
    tasks: Sequence[Task], stage: str, parts: Parts, *, size: int, folder: RunFolder
) -> list[Group]:
    """Run `size` Episodes of each Task; `stage` names their folder under `episodes/`.

    Episodes that are already finished on disk are read back, not run again, unless the machinery
    had lost them.
    """
    async with asyncio.TaskGroup() as running:
        waiting = [
            [running.create_task(_attempt(task, stage, k, parts, folder)) for k in range(size)]
            for task in tasks
        ]
    return [
        Group(task.id, tuple(attempt.result() for attempt in attempts))
        for task, attempts in zip(tasks, waiting, strict=True)
    ]


async def _attempt(task: Task, stage: str, k: int, parts: Parts, folder: RunFolder) -> Episode:
    name = f"{task.id.replace('/', '_')}.{k}"
    path = folder.episode(stage, name)
    if record.is_finished(path) and (kept := record.read(path)).learnable:
        return kept
    async with parts.provisioner.slot:
        result = await episode.run(task, f"{stage}/{name}", parts)
        for refill in range(parts.rollout.refills):
            if result.learnable or result.verdict is Verdict.INVALID:
                break
            result = await episode.run(task, f"{stage}/{name}+{refill + 1}", parts)
        record.write(path, result)
    return result
