"""Compute a reward over recorded Episodes: what would it have changed in training?

Nothing is sampled or graded again. The reward gets the recorded Grade, patch and Turns.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, fmean, median, pstdev
from typing import Any

from swerl.core.contracts import Attempt, Reward
from swerl.core.errors import InputError, RunError
from swerl.core.files import read_json
from swerl.core.task import Task, from_row
from swerl.recipe.schema import RolloutSection
from swerl.rollout import record
from swerl.rollout.reward import penalty
from swerl.runs.index import FoundRun

_SAME = 1e-9
"""Advantages and rewards closer than this are equal."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """A recorded Episode with its reward and the new one, both less the penalties."""

    group: str
    """Stage, Task and agent: the attempts whose rewards are compared in training."""
    folder: Path
    verdict: str
    num_tokens: int
    """Sampled tokens."""
    recorded: float
    reward: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """The rewards of one function over all Episodes."""

    mean: float
    deviation: float
    lowest: float
    median: float
    highest: float
    num_values: int
    groups_with_signal: int
    """Groups whose attempts differ in reward; only they are trained."""
    length_bias: float
    """Correlation of a reward with the logarithm of the Episode's tokens; 0 if either is equal."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The recorded rewards beside the new ones."""

    episodes: tuple[Rescored, ...]
    num_groups: int
    recorded: Distribution
    rewarded: Distribution
    reversed_groups: tuple[str, ...]
    """Groups in which an attempt above the mean falls below it, or the other way round."""
    left_out: Mapping[str, int]
    """Reason -> Episodes without a new reward."""

    def most_changed(self, count: int) -> list[Rescored]:
        """Return the Episodes whose reward changes most."""
        changed = [one for one in self.episodes if abs(one.reward - one.recorded) > _SAME]
        return sorted(changed, key=lambda one: -abs(one.reward - one.recorded))[:count]


def rescore(
    run: FoundRun, reward: Reward, task_of: Callable[[str], Task | None], rollout: RolloutSection
) -> Comparison:
    """Compute a reward over the Episodes of a run.

    `task_of` returns a Task by its id, `rollout` holds the penalties. Of a run of `swerl train` the
    training steps count, not its evaluations. Raises PluginError if the reward fails, InputError if
    no Episode can be rewarded.
    """
    left_out: Counter[str] = Counter()
    episodes = tuple(_rescored(run, reward, task_of, rollout, left_out))
    if not episodes:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        raise InputError(
            f"no Episode of {run.root} can be rewarded: {reasons or 'it holds none'}",
            hint="name a folder with finished Episodes, and their Tasks with --tasks FILE",
        )
    groups: dict[str, list[Rescored]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group].append(episode)
    return Comparison(
        episodes=episodes,
        num_groups=len(groups),
        recorded=_distribution(groups, lambda episode: episode.recorded),
        rewarded=_distribution(groups, lambda episode: episode.reward),
        reversed_groups=tuple(name for name, group in groups.items() if _is_reversed(group)),
        left_out=+left_out,
    )


def _rescored(
    run: FoundRun,
    reward: Reward,
    task_of: Callable[[str], Task | None],
    rollout: RolloutSection,
    left_out: Counter[str],
) -> Iterator[Rescored]:
    for stage, attempt, path in record.trained_attempts(run):
        if not attempt.summary:
            left_out["unfinished or damaged"] += 1
            continue
        try:
            episode = record.read(path)
            task = _kept_task(path) or task_of(episode.task_id)
        except RunError:
            left_out["unfinished or damaged"] += 1
            continue
        if not episode.learnable:
            left_out[f"{episode.verdict}, which is never trained"] += 1
        elif task is None:
            left_out["of an unknown Task"] += 1
        else:
            facts = (episode.grade, episode.status, episode.patch, episode.trajectory)
            value = reward(Attempt(task, *facts))
            yield Rescored(
                group=" ".join(filter(None, (stage, episode.task_id, episode.agent))),
                folder=path,
                verdict=str(episode.verdict),
                num_tokens=episode.trajectory.num_sampled_tokens,
                recorded=episode.reward,
                reward=value - penalty(episode.trajectory, episode.status, rollout),
            )


def _kept_task(folder: Path) -> Task | None:
    """Return the Task that `swerl rollout` writes beside an Episode."""
    path = folder / record.TASK
    return from_row(read_json(path)) if path.exists() else None


def penalties(recipe: Mapping[str, Any]) -> RolloutSection:
    """Return the section with a recorded recipe's penalties; keys of other versions are ignored."""
    stored = recipe.get("rollout", {})
    names = ("shaping", "max_context_tokens")
    return RolloutSection.model_validate({name: stored[name] for name in names if name in stored})


def _distribution(
    groups: Mapping[str, Sequence[Rescored]], of: Callable[[Rescored], float]
) -> Distribution:
    episodes = [episode for group in groups.values() for episode in group]
    rewards = [of(episode) for episode in episodes]
    lengths = [math.log1p(episode.num_tokens) for episode in episodes]
    varies = min(pstdev(rewards), pstdev(lengths)) > _SAME
    return Distribution(
        mean=fmean(rewards),
        deviation=pstdev(rewards),
        lowest=min(rewards),
        median=median(rewards),
        highest=max(rewards),
        num_values=len({round(value, 9) for value in rewards}),
        groups_with_signal=sum(_spread(map(of, group)) > _SAME for group in groups.values()),
        length_bias=correlation(lengths, rewards) if varies else 0.0,
    )


def _spread(rewards: Iterator[float]) -> float:
    values = list(rewards)
    return max(values) - min(values)


def _is_reversed(group: Sequence[Rescored]) -> bool:
    before = fmean(episode.recorded for episode in group)
    after = fmean(episode.reward for episode in group)
    return any(
        (episode.recorded - before) * (episode.reward - after) < -(_SAME**2) for episode in group
    )
