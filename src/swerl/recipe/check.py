"""Checks across a recipe's sections: budgets nest, plug-ins exist and accept their settings."""

from __future__ import annotations

import difflib
from itertools import pairwise

from pydantic import BaseModel, ValidationError

from swerl import plugins
from swerl.errors import RecipeError
from swerl.recipe.schema import BudgetsSection, PluginSection, Recipe

PLUGIN_SECTIONS = {
    "sandbox": "sandboxes",
    "harness": "harnesses",
    "engine": "engines",
    "algorithm": "algorithms",
}


def check(recipe: Recipe) -> None:
    """Raise RecipeError on the first thing that cannot run as written; starts nothing."""
    check_budgets(recipe.budgets)
    for section, kind in PLUGIN_SECTIONS.items():
        plugin_options(kind, getattr(recipe, section), section=section)
    rollout = recipe.rollout
    if rollout.max_new_tokens >= rollout.max_context_tokens:
        message = f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt"
        hint = f"set it below rollout.max_context_tokens = {rollout.max_context_tokens}"
        raise RecipeError(message, hint=hint)
    trainer = recipe.trainer
    if trainer.ranks % trainer.tensor_parallel:
        message = f"trainer.ranks = {trainer.ranks} is no multiple of trainer.tensor_parallel"
        raise RecipeError(message, hint=f"tensor_parallel is {trainer.tensor_parallel}")


def check_budgets(budgets: BudgetsSection) -> None:
    """Raise RecipeError unless every budget fits into the one around it."""
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
            message = f"budgets.{inner} = {inner_s:g} must be below budgets.{outer} = {outer_s:g}"
            raise RecipeError(message, hint=f"raise {outer} or lower {inner}")
    needed_s = budgets.agent_s + budgets.grading_s
    if needed_s > budgets.episode_s:
        message = f"agent_s + grading_s = {needed_s:g} exceed episode_s = {budgets.episode_s:g}"
        raise RecipeError(message, hint=f"set budgets.episode_s to {needed_s:g} or more")


def plugin_options(kind: str, chosen: PluginSection, *, section: str) -> BaseModel | None:
    """Return the plug-in's validated `Options`, or None where it has none to set.

    Raises UnknownNameError on an unknown `type`, RecipeError on settings it does not take.
    """
    model: type[BaseModel] | None = getattr(plugins.load(kind, chosen.type), "Options", None)
    if model is None:
        if chosen.options:
            message = f"{section}.type = {chosen.type!r} has no settings"
            raise RecipeError(message, hint=f"remove {', '.join(chosen.options)}")
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
    return RecipeError(message, hint="docs/recipes.md lists every key with its unit")
