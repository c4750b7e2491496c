"""Which Tasks a step works on, and the Groups that come of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from swerl.episode import Group
from swerl.errors import RunError
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.run.events import StepStarted
from swerl.run.layout import RunFolder
from swerl.task import Task
from swerl.tasks.admission import solve_rate


def choose(
    tasks: Sequence[Task], step: int, count: int, seed: int, *, easy_first: bool = False
) -> list[Task]:
    """Return the Tasks of a step: every Task once an epoch, each epoch in an order of its own.

    With `easy_first` chance only decides between Tasks that are equally often solved.
    """
    chosen: list[Task] = []
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        if easy_first:
            order.sort(key=lambda index: _difficulty(tasks[index]))
        chosen.append(tasks[order[offset]])
    return chosen


async def run_step(
    tasks: Sequence[Task], step: int, parts: Parts, folder: RunFolder
) -> list[Group]:
    """Run the Groups of a step. Raises RunError where too much was lost to machinery."""
    rollout = parts.rollout
    easy_first = rollout.order == "easy-first"
    chosen = choose(tasks, step, rollout.groups_per_step, parts.seed, easy_first=easy_first)
    size = rollout.episodes_per_group
    parts.emit(StepStarted(step, len(chosen) * size))
    groups = await group.run(chosen, f"{step:05d}", parts, size=size, folder=folder)
    _refuse_losses(groups, rollout.max_infra_rate)
    return groups


async def evaluate(
    tasks: Sequence[Task], stage: str, parts: Parts, folder: RunFolder
) -> list[Group]:
    """Run one Episode of each Task without training on it."""
    groups = await group.run(tasks, stage, parts, size=1, folder=folder)
    _refuse_losses(groups, parts.rollout.max_infra_rate)
    return groups


def _difficulty(task: Task) -> float:
    """Return a Task's place from easy to hard; one that was never probed comes last."""
    rate = solve_rate(task)
    return 1.0 if rate is None else -rate


def _refuse_losses(groups: Sequence[Group], allowed: float) -> None:
    episodes = [episode for group in groups for episode in group.episodes]
    lost = [episode for episode in episodes if not episode.learnable]
    if len(lost) > allowed * len(episodes):
        reasons = Counter(episode.grade.reason for episode in lost)
        message = (
            f"{len(lost)} of {len(episodes)} episodes were lost: {reasons.most_common(1)[0][0]}"
        )
        raise RunError(message, hint="`swerl doctor` checks the machine; the same command resumes")
