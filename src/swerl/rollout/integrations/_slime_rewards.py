"""Rewards of slime's flat list of samples, normalised per prompt with one vote a rollout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev

from swerl.core.errors import InputError
from swerl.rollout.integrations._slime_args import SlimeArgs, SlimeSample
from swerl.rollout.integrations._slime_samples import rollout_id

_STD_FLOOR = 1e-6
"""Added to the standard deviation, as slime does."""


def normalized(args: SlimeArgs, samples: Sequence[SlimeSample]) -> tuple[list[float], list[float]]:
    """Return a raw and a normalised reward for each sample.

    A removed sample's raw reward, which slime only logs, is the mean of those that count; its
    normalised one is 0. Raises InputError on samples without a group.
    """
    votes = _votes(samples)
    counted = [reward for group in votes.values() for reward in group.values()]
    mean = fmean(counted) if counted else 0.0
    scales = {group: _scale(args, list(found.values())) for group, found in votes.items()}
    raw, rewards = [], []
    for sample in samples:
        if sample.remove_sample:
            raw.append(mean)
            rewards.append(0.0)
            continue
        centre, scale = scales[sample.group_index]
        raw.append(float(sample.reward))
        rewards.append((raw[-1] - centre) / scale)
    return raw, rewards


def num_learnable(group: Sequence[SlimeSample | list[SlimeSample]]) -> int:
    """Return how many rollouts of a prompt were not lost."""
    firsts = [one[0] if isinstance(one, list) else one for one in group]
    return sum(not sample.remove_sample for sample in firsts)


def _votes(samples: Sequence[SlimeSample]) -> dict[int | None, dict[int | None, float]]:
    """Return each prompt's rewards by rollout."""
    votes: dict[int | None, dict[int | None, float]] = defaultdict(dict)
    for sample in samples:
        if sample.remove_sample:
            continue
        if sample.group_index is None or rollout_id(sample) is None:
            raise InputError(
                "a sample has no group_index, or neither rollout_id nor index",
                hint="take samples from slime's own data source",
            )
        votes[sample.group_index][rollout_id(sample)] = float(sample.reward)
    return votes


def _scale(args: SlimeArgs, rewards: Sequence[float]) -> tuple[float, float]:
    """Return what to take off a prompt's rewards, and what to divide them by."""
    mean = fmean(rewards)
    if len(set(rewards)) < 2:
        return mean, 1.0
    by_std = getattr(args, "advantage_estimator", "grpo") in ("grpo", "gspo")
    by_std = by_std and getattr(args, "grpo_std_normalization", True)
    return mean, stdev(rewards) + _STD_FLOOR if by_std else 1.0
