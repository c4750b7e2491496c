"""What of slime's arguments and samples is read, and the checks before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from swerl.core.chat import Json
from swerl.core.errors import InputError, TaskError
from swerl.core.secrets import secret
from swerl.core.task import Task, from_row
from swerl.recipe.check import check_budgets, check_rollout
from swerl.recipe.load import load
from swerl.recipe.schema import PluginSection, Recipe

NORMALIZE = "swerl.rollout.integrations.slime.normalize"
_NORMALISED = ("grpo", "gspo", "reinforce_plus_plus_baseline")
"""Estimators whose rewards slime normalises itself."""


class SlimeArgs(Protocol):
    """slime's parsed arguments; `swerl_recipe` may be added by `--custom-config-path`."""

    hf_checkpoint: str
    sglang_router_ip: str
    sglang_router_port: int


class SlimeSample(Protocol):
    """slime's Sample, as far as it is read and written here."""

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


def recipe_of(args: SlimeArgs) -> Recipe:
    """Read the recipe, with slime's router as its engine and slime's model as its tokenizer.

    Raises InputError on settings under which slime would train on wrong numbers.
    """
    path = getattr(args, "swerl_recipe", None) or secret("SWERL_RECIPE")
    if not path:
        message = "slime's arguments name no swerl recipe"
        hint = "set SWERL_RECIPE=recipe.toml, or swerl_recipe in --custom-config-path's file"
        raise InputError(message, hint=hint)
    recipe = load([Path(path)])
    _check(args)
    options = recipe.engine.options if recipe.engine.type == "sglang" else {}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    routed = bool(getattr(args, "use_rollout_routing_replay", False))
    engine = PluginSection(type="sglang", **{**options, "url": url, "routed_experts": routed})
    model = recipe.model.model_copy(update={"path": recipe.model.path or Path(args.hf_checkpoint)})
    room = getattr(args, "rollout_max_context_len", None)
    rollout = recipe.rollout.model_copy(update={"max_context_tokens": room} if room else {})
    check_budgets(recipe.budgets)
    return recipe.model_copy(update={"engine": engine, "model": model, "rollout": rollout})


def sampled(recipe: Recipe, params: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the sampling that slime asks for. Raises InputError."""
    top_p, top_k = params.get("top_p", 1.0), params.get("top_k", -1)
    if top_p != 1.0 or top_k not in (-1, 0):
        message = f"slime samples with top_p = {top_p} and top_k = {top_k}"
        hint = "set --rollout-top-p 1 --rollout-top-k -1: swerl trains the whole distribution"
        raise InputError(message, hint=hint)
    update = {
        "temperature": params.get("temperature", recipe.rollout.temperature),
        "max_new_tokens": params.get("max_new_tokens", recipe.rollout.max_new_tokens),
    }
    rollout = recipe.rollout.model_copy(update=update)
    check_rollout(rollout)
    return recipe.model_copy(update={"rollout": rollout})


def task_of(sample: SlimeSample) -> Task:
    """Read the Task from a row that `swerl convert` wrote. Raises TaskError on another."""
    if not isinstance(sample.prompt, str):
        raise TaskError(
            f"the prompt of {sample.label} is a chat, not the task's own words",
            hint="run slime without --apply-chat-template",
        )
    row: dict[str, Json] = {
        "prompt": sample.prompt,
        "label": sample.label or "",
        "metadata": sample.metadata,
    }
    return from_row(row)


def _check(args: SlimeArgs) -> None:
    """Refuse what would give wrong advantages or half an agent's work."""
    normalises = getattr(args, "advantage_estimator", "grpo") in _NORMALISED
    normalises = normalises and getattr(args, "rewards_normalization", True)
    if normalises and getattr(args, "custom_reward_post_process_path", None) != NORMALIZE:
        raise InputError(
            "slime would normalise rewards over samples, and count lost episodes as failed",
            hint=f"add --custom-reward-post-process-path {NORMALIZE}",
        )
    if getattr(args, "partial_rollout", False):
        raise InputError(
            "slime's --partial-rollout would send half an agent's work back",
            hint="leave it out: an agent cannot begin in the middle",
        )
    if getattr(args, "group_rm", False):
        raise InputError(
            "slime's --group-rm would grade an episode that is graded already", hint="leave it out"
        )
