"""Advantages of Episodes from their rewards; one vote each, whatever became of it.

Only learnable Episodes are compared: verdicts `infra` and `invalid` enter no mean and no standard
deviation, and get 0. How many Samples an Episode becomes is not known here, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from swerl.core.episode import Group

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""


def group_advantages(group: Group, *, normalize_std: bool) -> list[float]:
    """Return each Episode's reward less the Group's mean, over the standard deviation if asked.

    Everybody gets 0 where all rewards are equal or a single learnable Episode is left.
    """
    if not group.has_signal:
        return [0.0] * len(group.episodes)
    rewards = [episode.reward for episode in group.episodes if episode.learnable]
    mean = fmean(rewards)
    scale = stdev(rewards) + STD_FLOOR if normalize_std else 1.0
    return [
        (episode.reward - mean) / scale if episode.learnable else 0.0 for episode in group.episodes
    ]


def scale_over_step(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, centre: bool
) -> list[list[float]]:
    """Return advantages over their standard deviation in the whole step, centred first if asked.

    All are 0 where none differ.
    """
    values = [
        value
        for group, row in zip(groups, advantages, strict=True)
        for episode, value in zip(group.episodes, row, strict=True)
        if episode.learnable
    ]
    if len(set(values)) < 2:
        return [[0.0] * len(group.episodes) for group in groups]
    mean = fmean(values) if centre else 0.0
    scale = stdev(values) + STD_FLOOR
    return [
        [
            (value - mean) / scale if episode.learnable else 0.0
            for episode, value in zip(group.episodes, row, strict=True)
        ]
        for group, row in zip(groups, advantages, strict=True)
    ]
