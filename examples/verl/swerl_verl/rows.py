"""verl's settings and rows: read and checked, and Episodes converted to the fields of outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swerl.core.episode import Episode
from swerl.core.errors import InputError, TaskError
from swerl.core.grade import Verdict
from swerl.core.sample import Sample, to_samples
from swerl.core.task import Task, from_row
from swerl.recipe.check import check_budgets, check_rollout
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe


def recipe_of(config: Any, path: str) -> Recipe:
    """Read the recipe; its tokenizer is by default that of verl's model.

    Raises InputError on settings with which verl would train on wrong numbers.
    """
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if not trainer.get("use_v1", False):
        message = "verl's old trainer takes one row a rollout, and counts lost rollouts as failed"
        raise InputError(message, hint="set trainer.use_v1=True")
    if rollout.top_p != 1.0 or rollout.top_k not in (-1, 0):
        message = f"verl samples with top_p = {rollout.top_p} and top_k = {rollout.top_k}"
        hint = "set rollout.top_p=1 and rollout.top_k=-1: the whole distribution is trained"
        raise InputError(message, hint=hint)
    if rollout.get("enable_rollout_routing_replay", False):
        message = "verl would replay routed experts, which this agent loop does not hand on"
        raise InputError(message, hint="set rollout.enable_rollout_routing_replay=False")
    recipe = load([Path(path)])
    check_budgets(recipe.budgets)
    model = recipe.model
    if model.path is None:
        model = model.model_copy(update={"path": Path(config.actor_rollout_ref.model.path)})
    # A conversation of this length fits verl's response, however short its first prompt is.
    room = min(recipe.rollout.max_context_tokens, rollout.response_length)
    limits = recipe.rollout.model_copy(update={"max_context_tokens": room})
    return recipe.model_copy(update={"model": model, "rollout": limits})


def with_sampling(recipe: Recipe, params: Mapping[str, Any]) -> Recipe:
    """Return the recipe at verl's temperature, which is another one in validation."""
    update = {"temperature": float(params["temperature"])}
    changed = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=update)})
    check_rollout(changed)
    return changed


def task_of(row: Mapping[str, Any]) -> Task:
    """Read the Task from a row of verl's dataset. Raises TaskError on another row."""
    extra = row.get("extra_info")
    text = extra.get("task") if isinstance(extra, Mapping) else None
    if not isinstance(text, str):
        raise TaskError(
            "a row has no extra_info.task",
            hint="write the file with: swerl convert TASKS --format verl-parquet -o FILE",
        )
    return from_row(json.loads(text))


def outputs_of(episode: Episode, prompt_length: int) -> list[dict[str, Any]]:
    """Return the fields of an AgentLoopOutput for each row; none if the Episode was lost."""
    samples = to_samples(episode.trajectory, episode=episode.id, task=episode.task_id)
    if not episode.learnable:
        return []
    return [_fields(sample, episode, prompt_length) for sample in samples]


def _fields(sample: Sample, episode: Episode, prompt_length: int) -> dict[str, Any]:
    # The prompt ends before the first trained token; verl's limit moves its end to the response.
    start = min(sample.mask.index(1), prompt_length)
    turns, timings = episode.trajectory.turns, episode.timings
    model_s = sum(turn.duration_s for turn in turns)
    steps = [int(version) for version in sample.weight_versions]
    return {
        "prompt_ids": list(sample.ids[:start]),
        "response_ids": list(sample.ids[start:]),
        "response_mask": list(sample.mask[start:]),
        "response_logprobs": list(sample.logprobs[start:]),
        "reward_score": float(episode.reward),
        "num_turns": 2 * len(turns),
        "metrics": {
            "generate_sequences": model_s,
            "tool_calls": max(timings.get("agent", 0.0) - model_s, 0.0),
            "compute_score": timings.get("grade", 0.0),
        },
        "extra_fields": {
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": {"solved": float(episode.verdict is Verdict.SOLVED)},
            "swerl_episode": episode.id,
            "swerl_verdict": str(episode.verdict),
        },
    }
