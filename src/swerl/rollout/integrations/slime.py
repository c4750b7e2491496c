"""slime's hooks: swerl's agents, sandboxes and grading as the rollouts of a slime run.

slime loads the functions of this file by their dotted paths; docs/guides/slime.md has the flags.
slime is never imported: its Samples come in as arguments, and more are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swerl.rollout.integrations._slime_args import SlimeArgs, SlimeSample, task_of
from swerl.rollout.integrations._slime_grading import grade
from swerl.rollout.integrations._slime_rewards import normalized, num_learnable
from swerl.rollout.integrations._slime_samples import lost, to_eval_sample, to_train_samples
from swerl.rollout.integrations._slime_service import close_service, running_service

_FEWEST = 2
"""Rollouts of a prompt that must be left: fewer cannot be compared."""


async def generate(
    args: SlimeArgs,
    sample: SlimeSample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,
) -> SlimeSample | list[SlimeSample]:
    """Run an Episode of the sample's Task (`--custom-generate-function-path`).

    Returns one sample a row of the Episode, all with the whole reward; in evaluation one. What the
    machinery lost comes back aborted, removed, and with a reward that is no number. Raises
    InputError on settings or a row that cannot be used.
    """
    service = running_service(args)
    task = task_of(sample)
    result = await service.attempt(task, sample, sampling_params)
    if evaluation:
        return to_eval_sample(sample, result, service.text)
    return to_train_samples(sample, result, args, service.text)


async def reward(
    args: SlimeArgs, sample: SlimeSample | list[SlimeSample], **_: object
) -> float | list[float]:
    """Grade `sample.metadata["patch"]` in a clean sandbox (`--custom-rm-path`).

    For agents of your own: `generate` brings its rewards. What cannot be graded is marked as lost.
    """
    if isinstance(sample, list):
        return [await _reward(args, one) for one in sample]
    return await _reward(args, sample)


def normalize(args: SlimeArgs, samples: Sequence[SlimeSample]) -> tuple[list[float], list[float]]:
    """Return raw rewards and advantages (`--custom-reward-post-process-path`).

    Advantages are per prompt with one vote a rollout, however many samples it became; what the
    machinery lost enters no mean.
    """
    return normalized(args, samples)


def keep_group(
    args: SlimeArgs, group: Sequence[SlimeSample | list[SlimeSample]], **_: object
) -> bool:
    """Say whether a prompt has rollouts to compare (`--dynamic-sampling-filter-path`).

    slime then takes another prompt for one whose rollouts the machinery lost.
    """
    return num_learnable(group) >= _FEWEST


async def close() -> None:
    """Close the gateway and the engine's client of this event loop, and let nothing run on."""
    await close_service()


async def _reward(args: SlimeArgs, sample: SlimeSample) -> float:
    if sample.reward is not None:
        return float(sample.reward)
    service = running_service(args)
    graded = await grade(task_of(sample), sample.metadata.get("patch", ""), await service.parts())
    if graded.reward is None:
        return float(lost(sample, graded.verdict, graded.reason).reward)
    return graded.reward
