"""The Groups of one step: choose Tasks, roll them out, filter, refill, check for losses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from swerl.core.episode import Group
from swerl.core.errors import RecipeError, RunError, unknown
from swerl.core.events import Notice, StepStarted
from swerl.core.grade import Verdict
from swerl.core.task import Task
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.runs.layout import RunFolder

GroupFilter = Callable[[Group], bool]
"""Returns whether a Group is trained."""
MAX_LOST_SHARE = 0.25
"""Largest share of a step's Episodes that infrastructure may lose; above it the run stops."""


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The Groups of a step by their fate."""

    kept: tuple[Group, ...]
    """To be trained."""
    left_out: tuple[Group, ...] = ()
    """Rejected by the filter."""

    @property
    def all(self) -> tuple[Group, ...]:
        """Every Group that was rolled out."""
        return self.kept + self.left_out


async def run_step(tasks: Sequence[Task], step: int, parts: Parts, folder: RunFolder) -> StepGroups:
    """Run the Groups of a step, and more Groups in place of those that the filter rejects.

    The order of Tasks decides which Groups are kept, never the order of finishing: short Episodes
    get no advantage. Raises RunError if too many Episodes were lost to infrastructure.
    """
    rollout = parts.rollout
    num_groups, passes = rollout.groups_per_step, group_filter(rollout.group_filter)
    chosen = choose_tasks(tasks, step, num_groups, parts.seed)
    spare = iter(_spare_tasks(tasks, chosen, step, parts.seed))
    groups: list[Group] = []
    for _ in range(1 + rollout.refill_rounds):
        parts.emit(StepStarted(step, len(chosen) * rollout.episodes_per_group))
        # All rounds share the folder of the step; Task ids tell the Groups apart.
        size = rollout.episodes_per_group
        groups += await group.run(chosen, f"{step:05d}", parts, size=size, folder=folder)
        check_losses(groups)
        # The next round replaces the Groups that the filter has rejected.
        missing = num_groups - sum(map(passes, groups))
        chosen = list(islice(spare, missing))
        if not chosen:
            break
    trained = [candidate for candidate in groups if passes(candidate)]
    if len(trained) < num_groups:
        parts.emit(Notice(f"{len(trained)} of {num_groups} groups pass rollout.group_filter"))
    # If no Group passes, all advantages are 0: the step changes little, and the run continues.
    trained = trained or groups[:num_groups]
    kept_ids = {id(candidate) for candidate in trained}
    return StepGroups(
        tuple(trained), tuple(candidate for candidate in groups if id(candidate) not in kept_ids)
    )


def choose_tasks(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[Task]:
    """Return `count` different Tasks for a step; each epoch takes every Task, in a new order.

    The last step of an epoch is filled up with the epoch's first Tasks. Raises RecipeError if there
    are too few Tasks.
    """
    if len(tasks) < count:
        raise RecipeError(
            f"a step takes {count} tasks, and there are {len(tasks)}",
            hint="lower rollout.groups_per_step, or name more tasks",
        )
    return [tasks[index] for index in choose(len(tasks), step, count, seed)]


def choose(num: int, step: int, count: int, seed: int) -> list[int]:
    """Return `count` of `num` indices for a step; each epoch takes every one, in a new order.

    The last step of an epoch is filled up with its first indices.
    """
    epoch, part = divmod(step, ceil(num / count))
    order = list(range(num))
    # Each process with this seed computes the same order.
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [order[position % num] for position in range(part * count, (part + 1) * count)]


def _spare_tasks(tasks: Sequence[Task], chosen: Sequence[Task], step: int, seed: int) -> list[Task]:
    """Return the other Tasks in an order that a restart repeats; their own turn still comes."""
    ids = {task.id for task in chosen}
    others = [task for task in tasks if task.id not in ids]
    random.Random(f"{seed}/spare/{step}").shuffle(others)
    return others


def check_losses(groups: Sequence[Group]) -> None:
    """Raise RunError if infrastructure lost more than MAX_LOST_SHARE of the Episodes."""
    episodes = [episode for group in groups for episode in group.episodes]
    lost = (episode for episode in episodes if not episode.learnable)
    reasons = [episode.grade.reason or episode.error for episode in lost]
    require_few_lost(reasons, len(episodes))


def require_few_lost(reasons: Sequence[str], num_episodes: int) -> None:
    """Raise RunError if more than MAX_LOST_SHARE of the Episodes was lost, for these reasons."""
    if len(reasons) > MAX_LOST_SHARE * num_episodes:
        raise RunError(
            f"{len(reasons)} of {num_episodes} episodes were lost: "
            f"{Counter(reasons).most_common(1)[0][0]}",
            hint="`swerl doctor` checks the machine; the same command resumes",
        )


def group_filter(name: str) -> GroupFilter:
    """Return the filter of this name. Raises UnknownNameError."""
    if name not in _FILTERS:
        raise unknown("group filter", name, _FILTERS)
    return _FILTERS[name]


def _zero_variance(group: Group) -> bool:
    """Keep Groups whose learnable Episodes differ in reward; all others have advantage 0."""
    return group.has_signal


def _mixed_verdicts(group: Group) -> bool:
    """Keep Groups that compare at least one solved and one other learnable Episode.

    DAPO (arXiv 2503.14476), eq. 11. Reward shaping does not affect it, unlike `zero-variance`.
    """
    verdicts = [episode.verdict for episode in group.episodes if episode.learnable]
    return len({verdict is Verdict.SOLVED for verdict in verdicts}) > 1


_FILTERS: dict[str, GroupFilter] = {
    "none": lambda group: True,
    "zero-variance": _zero_variance,
    "mixed-verdicts": _mixed_verdicts,
}
