"""Check a recipe across its sections: nested budgets, installed plug-ins, valid settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ValidationError

from swerl.core import plugins
from swerl.core.errors import RecipeError, UnknownNameError
from swerl.core.files import read_json
from swerl.recipe.schema import BudgetsSection, PluginSection, Recipe, RolloutSection

PLUGIN_SECTIONS = {
    "sandbox": "sandboxes",
    "harness": "harnesses",
    "engine": "engines",
    "algorithm": "algorithms",
}


def check(recipe: Recipe) -> None:
    """Raise on the first setting that cannot run; start nothing.

    Raises RecipeError, and UnknownNameError on an unknown `type`.
    """
    check_budgets(recipe.budgets)
    check_rollout(recipe.rollout)
    check_schedule(recipe)
    check_replay(recipe)
    check_sandboxes(recipe)
    for section, kind in _given_sections(recipe):
        plugin_options(kind, getattr(recipe, section), section=section)
    trainer, model = recipe.trainer, recipe.model.path
    if trainer.ranks % trainer.tensor_parallel:
        raise RecipeError(
            f"trainer.ranks = {trainer.ranks} is not a multiple of trainer.tensor_parallel",
            hint=f"tensor_parallel is {trainer.tensor_parallel}",
        )
    if model is not None and not (model / "config.json").exists():
        raise RecipeError(
            f"model.path = {model} is not a model folder",
            hint="give a folder in Hugging Face format",
        )
    for obstacle in obstacles(recipe):
        raise RecipeError(obstacle, hint="`swerl train RECIPE --dry-run` prints its plan")


def _given_sections(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield section and kind of the plug-ins that a recipe names.

    Defaults are valid, and checking one would import it: `swerl rollout` needs no algorithm.
    """
    for section, kind in PLUGIN_SECTIONS.items():
        if section in recipe.model_fields_set:
            yield section, kind


def check_rollout(rollout: RolloutSection) -> None:
    """Raise RecipeError unless a reply leaves room for a prompt."""
    if rollout.max_new_tokens >= rollout.max_context_tokens:
        message = f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt"
        hint = f"set it below rollout.max_context_tokens = {rollout.max_context_tokens}"
        raise RecipeError(message, hint=hint)


def check_replay(recipe: Recipe) -> None:
    """Raise RecipeError if replay is on but the model has no experts or no one records them."""
    if not recipe.trainer.routing_replay:
        return
    if not recipe.engine.options.get("routed_experts"):
        message = "trainer.routing_replay = true, but the engine does not record its experts"
        hint = "set engine.type = 'sglang' and engine.routed_experts = true, or turn replay off"
        raise RecipeError(message, hint=hint)
    path = recipe.model.path
    if path is not None and (path / "config.json").exists() and not _num_experts(path):
        raise RecipeError(
            f"trainer.routing_replay = true, but {path} has no experts",
            hint="turn it off: replay is for mixture-of-experts models",
        )


def _num_experts(model: Path) -> int:
    """Return the number of experts in a model folder's config.json; 0 for a dense model."""
    config = read_json(model / "config.json")
    text = config.get("text_config") or config
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((text[name] for name in names if text.get(name)), 0)


def check_schedule(recipe: Recipe) -> None:
    """Raise RecipeError if rollouts and steps cannot overlap as the schedule requires."""
    schedule, cluster = recipe.schedule, recipe.cluster
    if schedule.mode != "sync" and cluster.gpus_per_node and cluster.colocate:
        raise RecipeError(
            f"schedule.mode = {schedule.mode!r} needs engines beside the trainer",
            hint="set cluster.colocate = false, or mode = 'sync'",
        )
    if schedule.mode != "async":
        return
    if schedule.replies == "keep" and recipe.engine.options.get("pause_mode") == "abort":
        raise RecipeError(
            "engine.pause_mode = 'abort' contradicts schedule.replies = 'keep'",
            hint="set schedule.replies = 'retry', or another pause_mode",
        )
    if recipe.rollout.oversample > 1:
        raise RecipeError(
            "rollout.oversample is for whole steps; the pool of `async` replaces single Groups",
            hint="set it to 1, and schedule.pool higher",
        )


def check_sandboxes(recipe: Recipe) -> None:
    """Raise RecipeError if sandboxes cannot run on the cluster's machines."""
    if not recipe.cluster.sandbox_cpus:
        return
    asked = f"cluster.sandbox_cpus = {recipe.cluster.sandbox_cpus}"
    if recipe.cluster.launcher == "local":
        raise RecipeError(
            f"{asked} with cluster.launcher = 'local'",
            hint="set cluster.launcher to ray, ssh or slurm, or leave it 0",
        )
    if recipe.sandbox.type == "e2b":
        message = f"{asked}, but sandboxes of sandbox.type = 'e2b' run elsewhere"
        hint = "set sandbox.type = 'local' or 'docker', or cluster.sandbox_cpus = 0"
        raise RecipeError(message, hint=hint)


def obstacles(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why a valid recipe cannot be launched here.

    Raises RecipeError on settings that an installed plug-in refuses.
    """
    for section, kind in _given_sections(recipe):
        chosen = getattr(recipe, section)
        try:
            plugin_options(kind, chosen, section=section)
        except UnknownNameError:
            yield f"{section}.type = {chosen.type!r} is not installed"
    if recipe.model.family not in set(plugins.names("families")):
        yield f"model.family = {recipe.model.family!r} is not installed"
    cluster = recipe.cluster
    if cluster.nodes > 1 and cluster.launcher == "local":
        yield f"cluster.nodes = {cluster.nodes}: set cluster.launcher to ray, ssh or slurm"


def check_budgets(budgets: BudgetsSection) -> None:
    """Raise RecipeError unless every budget is below the one that contains it."""
    chain = [
        ("model_call_s", budgets.model_call_s),
        ("tool_s", budgets.tool_s),
        ("agent_s", budgets.agent_s),
        ("grading_s", budgets.grading_s),
        ("episode_s", budgets.episode_s),
        ("sandbox_s", budgets.sandbox_s),
    ]
    for (inner, inner_s), (outer, outer_s) in pairwise(chain):
        if inner_s >= outer_s:
            raise RecipeError(
                f"budgets.{inner} = {inner_s:g} must be below budgets.{outer} = {outer_s:g}",
                hint=f"raise {outer} or lower {inner}",
            )
    needed_s = budgets.agent_s + budgets.grading_s
    if needed_s > budgets.episode_s:
        raise RecipeError(
            f"agent_s + grading_s = {needed_s:g} exceed episode_s = {budgets.episode_s:g}",
            hint=f"set budgets.episode_s to {needed_s:g} or more",
        )


def plugin_options(kind: str, chosen: PluginSection, *, section: str) -> BaseModel | None:
    """Return the plug-in's validated `Options`, or None if it has none.

    Raises UnknownNameError on an unknown `type`, RecipeError on settings that it refuses.
    """
    model = plugins.options_of(kind, chosen.type)
    if model is None:
        if chosen.options:
            raise RecipeError(
                f"{section}.type = {chosen.type!r} has no settings",
                hint=f"remove {', '.join(chosen.options)}",
            )
        return None
    try:
        return model.model_validate(chosen.options)
    except ValidationError as error:
        raise _explain(error, model, section) from error


def _explain(error: ValidationError, model: type[BaseModel], section: str) -> RecipeError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near or sorted(model.model_fields))}?"
        return RecipeError(f"unknown recipe key {section}.{name!r}", hint=hint)
    message = f"recipe key {section}.{name} = {first.get('input')!r}: {first['msg']}"
    return RecipeError(message, hint="docs/reference/recipe.md lists every key with its unit")
