"""Which Tasks a step works on, and the Groups that come of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from swerl.core.episode import Group
from swerl.core.errors import RecipeError, RunError
from swerl.core.events import Emit, Notice, StepStarted
from swerl.core.task import Task
from swerl.rollout import group
from swerl.rollout.filters import GroupFilter, group_filter
from swerl.rollout.parts import Parts
from swerl.runs.layout import RunFolder
from swerl.tasks.admission import solve_rate


def choose(
    tasks: Sequence[Task], step: int, count: int, seed: int, *, easy_first: bool = False
) -> list[Task]:
    """Return the Tasks of a step, all different: each epoch takes every Task, in its own order.

    The last step of an epoch is filled up with Tasks that the epoch took first. With `easy_first`
    chance only decides between Tasks that are equally often solved. Raises RecipeError where there
    are fewer Tasks than a step takes.
    """
    if len(tasks) < count:
        raise RecipeError(
            f"a step takes {count} tasks, and there are {len(tasks)}",
            hint="lower rollout.groups_per_step, or name more tasks",
        )
    epoch, part = divmod(step, ceil(len(tasks) / count))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    if easy_first:
        order.sort(key=lambda index: _difficulty(tasks[index]))
    places = range(part * count, (part + 1) * count)
    return [tasks[order[place % len(tasks)]] for place in places]


@dataclass(frozen=True, slots=True)
class Stale:
    """A Group that was dropped unfinished, or unused, because it had become too old."""

    task_id: str
    stage: str
    lengths: tuple[int, ...]
    """Tokens that were sampled for each of its Episodes."""


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The Groups of a step."""

    kept: tuple[Group, ...]
    """Those to train."""
    left_out: tuple[Group, ...] = ()
    """Those that the filter did not pass, and those beyond what was wanted."""
    stale: tuple[Stale, ...] = ()
    """Those that were dropped because they had become too old."""

    @property
    def all(self) -> tuple[Group, ...]:
        """Every Group that was rolled out."""
        return self.kept + self.left_out


async def run_step(tasks: Sequence[Task], step: int, parts: Parts, folder: RunFolder) -> StepGroups:
    """Run the Groups of a step, with more Tasks for Groups that the filter leaves out.

    Which Groups are kept follows from the order of the Tasks, never from who finished first: short
    Episodes are no better than long ones. Raises RunError where too much was lost to machinery.
    """
    rollout = parts.rollout
    wanted, passes = rollout.groups_per_step, group_filter(rollout.group_filter)
    easy_first = rollout.order == "easy-first"
    chosen = choose(tasks, step, wanted, parts.seed, easy_first=easy_first)
    spare = iter(_spare(tasks, chosen, step, parts.seed))
    chosen += islice(spare, ceil(wanted * rollout.oversample) - wanted)
    groups: list[Group] = []
    for _ in range(1 + rollout.refill_rounds):
        parts.emit(StepStarted(step, len(chosen) * rollout.episodes_per_group))
        groups += await group.run(
            chosen, f"{step:05d}", parts, size=rollout.episodes_per_group, folder=folder
        )
        refuse_losses(groups, rollout.max_infra_rate)
        missing = wanted - sum(map(passes, groups))
        chosen = list(islice(spare, ceil(max(missing, 0) * rollout.oversample)))
        if not chosen:
            break
    return _divide(groups, wanted, passes, parts.emit)


async def evaluate(
    tasks: Sequence[Task], stage: str, parts: Parts, folder: RunFolder, *, attempts: int
) -> list[Group]:
    """Run `attempts` Episodes of each Task without training on them."""
    groups = await group.run(tasks, stage, parts, size=attempts, folder=folder)
    refuse_losses(groups, parts.rollout.max_infra_rate)
    return groups


def _difficulty(task: Task) -> float:
    """Return a Task's place from easy to hard; one that was never probed comes last."""
    rate = solve_rate(task)
    return 1.0 if rate is None else -rate


def _spare(tasks: Sequence[Task], chosen: Sequence[Task], step: int, seed: int) -> list[Task]:
    """Return the other Tasks, in an order that is the same after a restart.

    They are extra: a Task tried here still comes in its turn of the epoch.
    """
    taken = {task.id for task in chosen}
    others = [task for task in tasks if task.id not in taken]
    random.Random(f"{seed}/spare/{step}").shuffle(others)
    return others


def _divide(groups: Sequence[Group], wanted: int, passes: GroupFilter, emit: Emit) -> StepGroups:
    """Keep the first Groups that pass, or the first of all where none does.

    Those have advantages of 0: the step changes little, and the run goes on.
    """
    kept = [each for each in groups if passes(each)][:wanted]
    if len(kept) < wanted:
        emit(Notice(f"{len(kept)} of {wanted} groups pass rollout.group_filter"))
    kept = kept or list(groups[:wanted])
    names = {id(each) for each in kept}
    return StepGroups(tuple(kept), tuple(each for each in groups if id(each) not in names))


def refuse_losses(groups: Sequence[Group], allowed: float) -> None:
    """Raise RunError where more than this share of the Episodes was lost to machinery."""
    episodes = [episode for group in groups for episode in group.episodes]
    lost = [episode for episode in episodes if not episode.learnable]
    if len(lost) > allowed * len(episodes):
        reasons = Counter(episode.grade.reason for episode in lost)
        raise RunError(
            f"{len(lost)} of {len(episodes)} episodes were lost: {reasons.most_common(1)[0][0]}",
            hint="`swerl doctor` checks the machine; the same command resumes",
        )
