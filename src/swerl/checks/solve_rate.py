"""Measure how hard Tasks are for a policy: several attempts each, and what they came to.

Attempts lie in a run folder as a training run's do, under the digest of the Task's row, so that a
killed probe goes on, more attempts add to fewer, and a changed Task is attempted anew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from swerl.core.certificate import row_digest
from swerl.core.chat import Json
from swerl.core.episode import Group
from swerl.core.grade import Verdict
from swerl.core.task import Task, write_tasks
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.runs.layout import RunFolder
from swerl.tasks import select


@dataclass(frozen=True, slots=True)
class Policy:
    """Who attempts the Tasks."""

    agent: str
    engine: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the attempts at one Task came to. Means are over those that say something."""

    task: str
    attempts: int
    """Attempts that say something about the policy."""
    lost: int
    """Attempts that the machinery lost for good."""
    solved: int = 0
    tokens: float = 0.0
    """Mean number of sampled tokens."""
    turns: float = 0.0
    seconds: float = 0.0

    @property
    def solve_rate(self) -> float | None:
        """Share of attempts that solved it; None where none counts."""
        return round(self.solved / self.attempts, 4) if self.attempts else None


async def probe(
    tasks: Iterable[Task],
    parts: Parts,
    folder: RunFolder,
    *,
    num_attempts: int,
    tell: Callable[[Probed], None] = lambda _: None,
) -> dict[str, Probed]:
    """Attempt every Task a number of times, and return what came of each by its id.

    Tasks are taken up one after the other, as many as keep all places for Episodes busy.
    """
    waiting = iter(tasks)
    found: dict[str, Probed] = {}

    async def work() -> None:
        for task in waiting:
            stage = row_digest(task)
            [done] = await group.run([task], stage, parts, size=num_attempts, folder=folder)
            found[task.id] = summary(done)
            tell(found[task.id])

    async with asyncio.TaskGroup() as running:
        for _ in range(math.ceil(parts.rollout.concurrency / num_attempts)):
            running.create_task(work())
    return found


def summary(done: Group) -> Probed:
    """Return what the Episodes of a Task came to."""
    counted = [episode for episode in done.episodes if episode.learnable]
    lost = len(done.episodes) - len(counted)
    if not counted:
        return Probed(done.task_id, 0, lost)
    return Probed(
        task=done.task_id,
        attempts=len(counted),
        lost=lost,
        solved=sum(episode.verdict is Verdict.SOLVED for episode in counted),
        tokens=_mean([episode.trajectory.num_sampled_tokens for episode in counted]),
        turns=_mean([len(episode.trajectory.turns) for episode in counted]),
        seconds=_mean([episode.timings["total"] for episode in counted]),
    )


def write(tasks: Path, out: Path, found: Mapping[str, Probed], policy: Policy) -> int:
    """Write every Task of a file, probed ones with their solve rate; return how many have one."""
    with_rate = {name for name, each in found.items() if each.solve_rate is not None}
    write_tasks(
        out,
        (
            noted(task, found[task.id], policy) if task.id in with_rate else task
            for _, task in select.lines(tasks)
        ),
    )
    return len(with_rate)


def noted(task: Task, found: Probed, policy: Policy) -> Task:
    """Return the Task with what probing found in its metadata; its Certificate stays good."""
    told: dict[str, Json] = {**asdict(found), **asdict(policy)}
    del told["task"]
    return replace(task, metadata={**task.metadata, "solve_rate": found.solve_rate, "probe": told})


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 2)
