"""Measure how often a policy solves each Task.

Attempts are kept in a run folder like those of a training run, under the digest of the Task's row.
So a killed measurement resumes, more attempts add to fewer, and a changed Task is attempted anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from swerl.core.certificate import row_digest
from swerl.core.chat import Json
from swerl.core.episode import Group
from swerl.core.grade import Verdict
from swerl.core.jobs import run_jobs
from swerl.core.task import Task, write_tasks
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.runs.layout import RunFolder
from swerl.tasks import select


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """The policy whose attempts are counted."""

    agent: str
    engine: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts at one Task. Means are over the attempts that count."""

    task: str
    attempts: int
    """Attempts that count."""
    lost: int
    """Attempts that the infrastructure lost for good."""
    solved: int = 0
    tokens: float = 0.0
    """Mean number of sampled tokens."""
    turns: float = 0.0
    seconds: float = 0.0

    @property
    def solve_rate(self) -> float | None:
        """Share of counted attempts that solved the Task; None if none counts."""
        return round(self.solved / self.attempts, 4) if self.attempts else None


async def measure(
    tasks: Iterable[Task],
    parts: Parts,
    folder: RunFolder,
    *,
    num_attempts: int,
    on_done: Callable[[Attempts], None] = lambda _: None,
) -> dict[str, Attempts]:
    """Attempt every Task `num_attempts` times, and return the outcomes by Task id.

    As many Tasks run at once as keep all slots for Episodes busy.
    """

    async def attempt(task: Task) -> Attempts:
        [done] = await group.run([task], row_digest(task), parts, size=num_attempts, folder=folder)
        return summary(done)

    at_once = math.ceil(parts.rollout.concurrency / num_attempts)
    found = await run_jobs(tasks, attempt, limit=at_once, on_done=on_done)
    return {each.task: each for each in found}


def summary(done: Group) -> Attempts:
    """Sum up the Episodes of a Task."""
    counted = [episode for episode in done.episodes if episode.learnable]
    lost = len(done.episodes) - len(counted)
    if not counted:
        return Attempts(done.task_id, 0, lost)
    return Attempts(
        task=done.task_id,
        attempts=len(counted),
        lost=lost,
        solved=sum(episode.verdict is Verdict.SOLVED for episode in counted),
        tokens=round(fmean(each.trajectory.num_sampled_tokens for each in counted), 2),
        turns=round(fmean(len(each.trajectory.turns) for each in counted), 2),
        seconds=round(fmean(each.timings["total"] for each in counted), 2),
    )


def write(tasks: Path, out: Path, found: Mapping[str, Attempts], policy: MeasuredPolicy) -> int:
    """Copy a task file with the solve rates added; return the number of Tasks that have one."""
    rated = {name for name, each in found.items() if each.solve_rate is not None}
    write_tasks(
        out,
        (
            _rated(task, found[task.id], policy) if task.id in rated else task
            for _, task in select.lines(tasks)
        ),
    )
    return len(rated)


def _rated(task: Task, found: Attempts, policy: MeasuredPolicy) -> Task:
    """Add the solve rate to a Task's metadata; its Certificate stays valid."""
    details: dict[str, Json] = {**asdict(found), **asdict(policy)}
    del details["task"]
    added = {"solve_rate": found.solve_rate, "probe": details}
    return replace(task, metadata={**task.metadata, **added})
