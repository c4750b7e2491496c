"""Groups: n concurrent Episodes of each Task; an Episode lost to infrastructure runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swerl.core.episode import REFILLS, Episode, Group
from swerl.core.errors import PluginError
from swerl.core.grade import Confirmation, Verdict
from swerl.core.task import Task, folder_name
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


async def run_one(task: Task, stage: str, parts: Parts, *, size: int, folder: RunFolder) -> Group:
    """Run `size` Episodes of a Task; `stage` names their folder under `episodes/`.

    All of them have one agent. Episodes already finished on disk are read back and not run again,
    unless infrastructure had lost them.
    """
    drawn = parts.drawn(f"{stage}/{task.id}")
    names = [f"{id_prefix(task, stage)}{number}" for number in range(size)]
    async with asyncio.TaskGroup() as running:
        attempts = [running.create_task(_run_recorded(task, name, drawn, folder)) for name in names]
    paths = [folder.episode(*name.split("/")) for name in names]
    episodes = await _audited([attempt.result() for attempt in attempts], paths, task, parts)
    return Group(task.id, episodes, drawn.agent if parts.mix else "")


async def _audited(
    episodes: Sequence[Episode], paths: Sequence[Path], task: Task, parts: Parts
) -> tuple[Episode, ...]:
    """Confirm all solved Episodes of a Group in which one is forged.

    A reward that comes nine times in ten teaches cheating.
    """
    if not any(episode.grade.confirmation is Confirmation.FORGED for episode in episodes):
        return tuple(episodes)

    async def confirmed(earlier: Episode, path: Path) -> Episode:
        is_open = earlier.grade.confirmation is Confirmation.NONE
        if earlier.verdict is not Verdict.SOLVED or not is_open:
            return earlier
        async with parts.sandboxes.slot:
            result = await episode.confirm(earlier, task, parts)
        return record.write(path, result)

    async with asyncio.TaskGroup() as running:
        attempts = [
            running.create_task(confirmed(earlier, path))
            for earlier, path in zip(episodes, paths, strict=True)
        ]
    return tuple(attempt.result() for attempt in attempts)


def id_prefix(task: Task, stage: str) -> str:
    """Return the common start of the ids of a Group's Episodes."""
    return f"{stage}/{folder_name(task)}."


async def _run_recorded(task: Task, name: str, parts: Parts, folder: RunFolder) -> Episode:
    path = folder.episode(*name.split("/"))
    lost_tokens = 0
    # A finished Episode needs no slot; one that was lost runs again.
    if record.is_finished(path):
        earlier = record.read(path)
        if earlier.learnable:
            return earlier
        lost_tokens = _sampled_tokens(earlier)
    async with parts.sandboxes.slot:
        try:
            result = await run_with_refills(task, name, parts, lost_tokens=lost_tokens)
            written = record.write(path, result)
            if written.fault:
                raise PluginError(written.fault, hint=f"correct it and resume; {path} is kept")
            return written
        finally:
            # Written experts are in the Episode's folder; those of lost attempts are not needed.
            if spool := parts.spool:
                for attempt in _attempt_names(name):
                    spool.drop(attempt)


async def run_with_refills(task: Task, name: str, parts: Parts, *, lost_tokens: int = 0) -> Episode:
    """Run an Episode, and up to REFILLS times again if infrastructure loses it.

    The caller holds a slot of the sandbox pool. `lost_tokens` is the count of earlier attempts.
    """
    for attempt in (attempts := _attempt_names(name)):
        result = await episode.run(task, attempt, parts)
        # A broken image breaks the next attempt too.
        if result.learnable or result.verdict is Verdict.INVALID or attempt == attempts[-1]:
            break
        lost_tokens += _sampled_tokens(result)
    return replace(result, lost_tokens=lost_tokens)


def _attempt_names(name: str) -> list[str]:
    return [name, *(f"{name}+{refill + 1}" for refill in range(REFILLS))]


def _sampled_tokens(lost: Episode) -> int:
    return lost.lost_tokens + lost.trajectory.num_sampled_tokens
