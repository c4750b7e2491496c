"""slime's arguments and Samples: read and checked, and Episodes converted to Samples."""

from __future__ import annotations

import copy
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol, TypeVar

from swerl.core import experts
from swerl.core.chat import Finish, Json
from swerl.core.contracts import Family
from swerl.core.episode import Episode
from swerl.core.errors import InputError, TaskError
from swerl.core.sample import Sample, to_samples
from swerl.core.task import Task, from_row
from swerl.recipe.check import check_budgets, check_rollout
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import PluginSection

NORMALIZE = "swerl_slime.hooks.normalize"
_NORMALIZED = ("grpo", "gspo", "reinforce_plus_plus_baseline")
"""Estimators whose rewards slime normalizes itself."""
_STD_FLOOR = 1e-6
"""Added to the standard deviation, as slime does."""


class SlimeArgs(Protocol):
    """slime's parsed arguments; `--custom-config-path` may add `swerl_recipe`."""

    hf_checkpoint: str
    sglang_router_ip: str
    sglang_router_port: int


class SlimeSample(Protocol):
    """The fields of slime's Sample that are read or written here."""

    group_index: int | None
    index: int | None
    rollout_id: int | None
    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    label: str | None
    reward: Any
    loss_mask: list[int] | None
    weight_versions: list[str]
    rollout_log_probs: list[float] | None
    rollout_routed_experts: Any
    remove_sample: bool
    status: Any
    metadata: dict[str, Any]
    session_id: str | None
    non_generation_time: float


_S = TypeVar("_S", bound=SlimeSample)


def recipe_of(args: SlimeArgs) -> Recipe:
    """Read the recipe; slime's router becomes its engine, slime's model its tokenizer.

    Raises InputError on settings with which slime would train on wrong numbers.
    """
    path = getattr(args, "swerl_recipe", None) or os.environ.get("SWERL_RECIPE")
    if not path:
        message = "slime's arguments name no swerl recipe"
        hint = "set SWERL_RECIPE=recipe.toml, or swerl_recipe in --custom-config-path's file"
        raise InputError(message, hint=hint)
    recipe = load([Path(path)])
    _check_args(args)
    # Options of another engine type do not apply to slime's router.
    options = recipe.engine.options if recipe.engine.type == "sglang" else {}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    routed = bool(getattr(args, "use_rollout_routing_replay", False))
    engine = PluginSection(type="sglang", **{**options, "url": url, "routed_experts": routed})
    model = recipe.model.model_copy(update={"path": recipe.model.path or Path(args.hf_checkpoint)})
    # slime's limit, if set, replaces the recipe's.
    room = getattr(args, "rollout_max_context_len", None)
    rollout = recipe.rollout.model_copy(update={"max_context_tokens": room} if room else {})
    check_budgets(recipe.budgets)
    return recipe.model_copy(update={"engine": engine, "model": model, "rollout": rollout})


def _check_args(args: SlimeArgs) -> None:
    normalizes = getattr(args, "advantage_estimator", "grpo") in _NORMALIZED
    normalizes = normalizes and getattr(args, "rewards_normalization", True)
    if normalizes and getattr(args, "custom_reward_post_process_path", None) != NORMALIZE:
        raise InputError(
            "slime would normalize rewards over samples, and count lost episodes as failed",
            hint=f"add --custom-reward-post-process-path {NORMALIZE}",
        )
    if getattr(args, "partial_rollout", False):
        raise InputError(
            "slime's --partial-rollout would resubmit half-finished episodes",
            hint="leave it out: an agent cannot start in the middle",
        )
    if getattr(args, "group_rm", False):
        raise InputError(
            "slime's --group-rm would grade an episode that is graded already", hint="leave it out"
        )


def with_sampling(recipe: Recipe, params: Mapping[str, Any]) -> Recipe:
    """Return the recipe with slime's sampling parameters. Raises InputError."""
    top_p, top_k = params.get("top_p", 1.0), params.get("top_k", -1)
    if top_p != 1.0 or top_k not in (-1, 0):
        message = f"slime samples with top_p = {top_p} and top_k = {top_k}"
        hint = "set --rollout-top-p 1 --rollout-top-k -1: swerl trains the whole distribution"
        raise InputError(message, hint=hint)
    update = {
        "temperature": params.get("temperature", recipe.rollout.temperature),
        "max_new_tokens": params.get("max_new_tokens", recipe.rollout.max_new_tokens),
    }
    changed = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=update)})
    check_rollout(changed)
    return changed


def task_of(sample: SlimeSample) -> Task:
    """Read the Task from a row that `swerl convert` wrote. Raises TaskError on another row."""
    if not isinstance(sample.prompt, str):
        raise TaskError(
            f"the prompt of {sample.label} is a chat, not the task's text",
            hint="run slime without --apply-chat-template",
        )
    row: dict[str, Json] = {
        "prompt": sample.prompt,
        "label": sample.label or "",
        "metadata": sample.metadata,
    }
    return from_row(row)


def to_train_samples(
    base: SlimeSample, result: Episode, args: SlimeArgs, family: Family
) -> list[SlimeSample]:
    """Return one slime Sample per row of the Episode, or one that slime drops.

    All rows of an Episode share `rollout_id`, so slime gives them one vote in the loss.
    """
    rows = to_samples(result.trajectory, episode=result.id, task=result.task_id)
    if not result.learnable:
        return [lost(copy.copy(base), result.verdict, result.grade.reason)]
    if not rows:
        return [lost(copy.copy(base), "nothing sampled", "the agent never called the model")]
    replays = bool(getattr(args, "use_rollout_routing_replay", False))
    # The last token is never an input, so a whole row has one record fewer than tokens.
    if replays and any(row.num_routed != len(row.ids) - 1 for row in rows):
        reason = "slime replays the experts of whole rows only"
        return [lost(copy.copy(base), "routed experts missing", reason)]
    return [_to_sample(base, row, result, family, replays=replays) for row in rows]


def to_eval_sample(base: SlimeSample, result: Episode, family: Family) -> SlimeSample:
    """Return the longest row of the Episode as one Sample.

    slime's evaluation drops nothing, so an Episode that infrastructure lost is aborted with reward
    0; the metadata holds its verdict.
    """
    rows = to_samples(result.trajectory, episode=result.id, task=result.task_id)
    if result.learnable and rows:
        longest = max(rows, key=lambda row: len(row.ids))
        return _to_sample(base, longest, result, family, replays=False)
    sample = lost(copy.copy(base), result.verdict, result.grade.reason)
    sample.reward = result.reward if result.learnable else 0.0
    return sample


def lost(sample: _S, verdict: str, reason: str) -> _S:
    """Mark a Sample as lost: aborted, removed, without a trained token.

    Its reward is NaN, so it cannot pass for a failed attempt; `normalized` leaves it out.
    """
    # A placeholder row: one prompt token and one response token that is not trained.
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    sample.weight_versions = []
    sample.reward, sample.remove_sample = math.nan, True
    sample.status = type(sample).Status.ABORTED  # type: ignore[attr-defined]
    sample.rollout_id = _rollout_id(sample)
    summary = {"verdict": str(verdict), "reason": reason}
    sample.metadata = {**sample.metadata, "swerl_episode": summary}
    return sample


def _rollout_id(sample: SlimeSample) -> int | None:
    rollout_id: int | None = getattr(sample, "rollout_id", None)
    return sample.index if rollout_id is None else rollout_id


def _to_sample(
    base: SlimeSample, row: Sample, result: Episode, family: Family, *, replays: bool
) -> SlimeSample:
    """Convert one row; its response begins with the first trained token."""
    start = row.mask.index(1)
    sample = copy.copy(base)
    statuses = type(sample).Status  # type: ignore[attr-defined]
    is_cut = result.trajectory.turns[-1].finish is Finish.LENGTH
    model_s = sum(turn.duration_s for turn in result.trajectory.turns)
    sample.tokens = list(row.ids)
    sample.response_length = len(row.ids) - start
    sample.response = family.text(row.ids[start:])
    sample.loss_mask = list(row.mask[start:])
    sample.rollout_log_probs = list(row.logprobs[start:])
    sample.weight_versions = list(row.weight_versions)
    sample.reward = result.reward
    sample.remove_sample = False
    sample.rollout_id = _rollout_id(base)
    sample.status = statuses.TRUNCATED if is_cut else statuses.COMPLETED
    sample.non_generation_time = max(result.timings.get("total", 0.0) - model_s, 0.0)
    summary = {
        "episode": result.id,
        "verdict": str(result.verdict),
        "status": str(result.status),
        "share": row.share,
        "turns": len(result.trajectory.turns),
        "timings": dict(result.timings),
        "dropped_tokens": dict(result.trajectory.dropped),
    }
    sample.metadata = {**base.metadata, "swerl_episode": summary}
    if replays:
        sample.rollout_routed_experts = _experts(row)
    return sample


def _experts(row: Sample) -> Any:
    """Return the experts of every position, int32 [T - 1, layers, top k]."""
    import numpy as np

    data = experts.read(row.routed)
    pieces = [
        np.frombuffer(ids, f"u{piece.bytes_per_id}").reshape(-1, piece.num_layers, piece.top_k)
        for piece, ids in zip(row.routed, data, strict=True)
    ]
    return np.concatenate(pieces).astype(np.int32)


def normalized(args: SlimeArgs, samples: Sequence[SlimeSample]) -> tuple[list[float], list[float]]:
    """Return a raw and a normalized reward for each sample.

    A removed sample's normalized reward is 0. Its raw one, which slime only logs, is the mean of
    the samples that count. Raises InputError on samples without a group.
    """
    votes = _votes(samples)
    counted = [reward for group in votes.values() for reward in group.values()]
    mean = fmean(counted) if counted else 0.0
    scales = {group: _scale(args, list(rollouts.values())) for group, rollouts in votes.items()}
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
    """Return the number of a prompt's rollouts that were not lost."""
    firsts = [rows[0] if isinstance(rows, list) else rows for rows in group]
    return sum(not sample.remove_sample for sample in firsts)


def _votes(samples: Sequence[SlimeSample]) -> dict[int | None, dict[int | None, float]]:
    """Return each prompt's rewards by rollout."""
    votes: dict[int | None, dict[int | None, float]] = defaultdict(dict)
    for sample in samples:
        if sample.remove_sample:
            continue
        if sample.group_index is None or _rollout_id(sample) is None:
            raise InputError(
                "a sample has no group_index, or neither rollout_id nor index",
                hint="take samples from slime's own data source",
            )
        # All rows of a rollout have the same reward; the key keeps one vote for each rollout.
        votes[sample.group_index][_rollout_id(sample)] = float(sample.reward)
    return votes


def _scale(args: SlimeArgs, rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a prompt's rewards, and the divisor."""
    mean = fmean(rewards)
    # `stdev` needs two values, and the differences of equal rewards are 0 for any divisor.
    if len(set(rewards)) < 2:
        return mean, 1.0
    by_std = getattr(args, "advantage_estimator", "grpo") in ("grpo", "gspo")
    by_std = by_std and getattr(args, "grpo_std_normalization", True)
    return mean, stdev(rewards) + _STD_FLOOR if by_std else 1.0
