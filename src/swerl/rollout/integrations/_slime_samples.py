"""An Episode as slime's Samples: one a row, and one that is dropped where the machinery failed."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

from swerl.core import experts
from swerl.core.chat import Finish
from swerl.core.contracts import Family
from swerl.core.episode import Episode
from swerl.core.sample import Sample, to_samples
from swerl.rollout.integrations._slime_args import SlimeArgs, SlimeSample

_S = TypeVar("_S", bound=SlimeSample)


def to_train_samples(
    base: SlimeSample, result: Episode, args: SlimeArgs, family: Family
) -> list[SlimeSample]:
    """Return one slime Sample a row of the Episode, or one that slime drops.

    All rows of an Episode share `rollout_id`, by which slime gives it one vote in the loss.
    """
    rows = to_samples(result.trajectory, episode=result.id, task=result.task_id)
    if not result.learnable:
        return [lost(copy.copy(base), result.verdict, result.grade.reason)]
    if not rows:
        return [lost(copy.copy(base), "nothing sampled", "the model was never asked")]
    replays = bool(getattr(args, "use_rollout_routing_replay", False))
    if replays and any(row.num_routed != len(row.ids) - 1 for row in rows):
        reason = "slime replays the experts of whole rows only"
        return [lost(copy.copy(base), "routed experts missing", reason)]
    return [_to_sample(base, row, result, family, replays=replays) for row in rows]


def to_eval_sample(base: SlimeSample, result: Episode, family: Family) -> SlimeSample:
    """Return one Sample with the Episode's reward: its longest row.

    slime's evaluation drops nothing, so an Episode that the machinery lost is aborted with reward
    0, and its verdict stands in the metadata.
    """
    rows = to_samples(result.trajectory, episode=result.id, task=result.task_id)
    if result.learnable and rows:
        longest = max(rows, key=lambda row: len(row.ids))
        return _to_sample(base, longest, result, family, replays=False)
    made = lost(copy.copy(base), result.verdict, result.grade.reason)
    made.reward = result.reward if result.learnable else 0.0
    return made


def lost(sample: _S, verdict: str, reason: str) -> _S:
    """Mark a Sample as lost: aborted, removed, without a trained token.

    Its reward is no number, so that nothing can take it for a failed attempt: `normalize` leaves
    removed samples out of every mean.
    """
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    sample.weight_versions = []
    sample.reward, sample.remove_sample = math.nan, True
    sample.status = type(sample).Status.ABORTED  # type: ignore[attr-defined]
    sample.rollout_id = rollout_id(sample)
    told = {"verdict": str(verdict), "reason": reason}
    sample.metadata = {**sample.metadata, "swerl_episode": told}
    return sample


def rollout_id(sample: SlimeSample) -> int | None:
    """Return what the samples of one rollout share."""
    named: int | None = getattr(sample, "rollout_id", None)
    return sample.index if named is None else named


def _to_sample(
    base: SlimeSample, row: Sample, result: Episode, family: Family, *, replays: bool
) -> SlimeSample:
    """Return a row; its response begins with the first trained token."""
    start = row.mask.index(1)
    sample = copy.copy(base)
    sample.tokens = list(row.ids)
    sample.response_length = len(row.ids) - start
    sample.response = family.text(row.ids[start:])
    sample.loss_mask = list(row.mask[start:])
    sample.rollout_log_probs = list(row.logprobs[start:])
    sample.weight_versions = list(row.weight_versions)
    sample.reward = result.reward
    sample.remove_sample = False
    sample.rollout_id = rollout_id(base)
    sample.status = _status(result, sample)
    sample.non_generation_time = _other_seconds(result)
    sample.metadata = {**base.metadata, "swerl_episode": _about(row, result)}
    if replays:
        sample.rollout_routed_experts = _experts(row)
    return sample


def _about(row: Sample, result: Episode) -> dict[str, Any]:
    return {
        "episode": result.id,
        "verdict": str(result.verdict),
        "status": str(result.status),
        "share": row.share,
        "turns": len(result.trajectory.turns),
        "timings": dict(result.timings),
        "dropped_tokens": dict(result.trajectory.dropped),
    }


def _status(result: Episode, sample: SlimeSample) -> Any:
    """Say whether the Episode's last reply was cut off at its length."""
    statuses = type(sample).Status  # type: ignore[attr-defined]
    is_cut = result.trajectory.turns[-1].finish is Finish.LENGTH
    return statuses.TRUNCATED if is_cut else statuses.COMPLETED


def _other_seconds(result: Episode) -> float:
    """Return the Episode's seconds in which the model was not speaking."""
    spoken = sum(turn.duration_s for turn in result.trajectory.turns)
    return max(result.timings.get("total", 0.0) - spoken, 0.0)


def _experts(row: Sample) -> Any:
    """Return the experts of every position, int32 [T - 1, layers, top k]."""
    import numpy as np

    data = experts.read(row.routed)
    pieces = [
        np.frombuffer(ids, f"u{piece.bytes_per_id}").reshape(-1, piece.num_layers, piece.top_k)
        for piece, ids in zip(row.routed, data, strict=True)
    ]
    return np.concatenate(pieces).astype(np.int32)
