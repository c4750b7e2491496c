"""What an estimate assumes: of the 8-node example, or of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from swerl.plan.cost.estimate import CASES, Assumption
from swerl.plan.cost.prices import price_book
from swerl.plan.cost.rollouts import LOST_SHARE, PASSING_SHARE, attempts, group_factor
from swerl.recipe.schema import Recipe

EXAMPLE_AGENT_S = 1800
"""Agent budget that the sandbox-seconds of the example belong to."""
EXAMPLE_SANDBOX_SECONDS = (520.0, 1140.0, 2400.0)
"""Of one Episode's two sandboxes together. The high case is the whole agent budget of 1,800 s and
the whole test budget of 600 s; low and middle are the published estimate's."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the numbers come from, in words."""

    run: str
    seconds: str
    minutes: str


def example() -> tuple[Assumption, ...]:
    """Return the assumptions of the 8-node example: 64 H100, E2B, 100 steps of 64 Episodes."""
    recipe = Recipe.model_validate(
        {
            "name": "example",
            "steps": 100,
            "rollout": {"groups_per_step": 8, "episodes_per_group": 8},
            "limits": {"num_cpus": 4, "memory_mib": 8192},
            "sandbox": {"type": "e2b"},
            "tasks": {"source": "tasks.jsonl"},
            "cluster": {"nodes": 8, "gpus_per_node": 8, "gpu": "h100"},
            "cost": {"sandbox_seconds": EXAMPLE_SANDBOX_SECONDS},
        }
    )
    published = "the example's published estimate"
    return _assumptions(recipe, _Source("8-node example", published, published))


def from_recipe(recipe: Recipe) -> tuple[Assumption, ...]:
    """Return the assumptions of a recipe; a price that is not in the book is NaN."""
    given = recipe.cost.model_fields_set
    seconds = "recipe: cost.sandbox_seconds"
    if recipe.cost.sandbox_seconds is None:
        seconds = f"the 8-node example's, scaled to budgets.agent_s = {recipe.budgets.agent_s:g}"
    minutes = "recipe: cost.step_minutes"
    if "step_minutes" not in given:
        minutes = "the 8-node example's published estimate"
        if not recipe.cluster.gpus_per_node:
            minutes = "a run on CPU: set cost.step_minutes to see its hours"
    return _assumptions(recipe, _Source("recipe", seconds, minutes))


def _assumptions(recipe: Recipe, source: _Source) -> tuple[Assumption, ...]:
    run = source.run
    limits, cluster, rollout = recipe.limits, recipe.cluster, recipe.rollout
    rows = [
        Assumption("steps", recipe.steps, "optimizer steps", run),
        Assumption("groups_per_step", rollout.groups_per_step, "tasks a step", run),
        Assumption("episodes_per_group", rollout.episodes_per_group, "episodes a task", run),
        Assumption("group_factor", group_factor(rollout), "groups begun a group", _filter(recipe)),
        Assumption("eval_episodes", *_evaluations(recipe)),
        Assumption(
            "attempts", attempts(rollout), "attempts an episode", f"assumed: {LOST_SHARE:.0%} lost"
        ),
        Assumption("sandboxes_per_episode", 2, "sandboxes", "one for the agent, one for grading"),
        Assumption("vcpus", limits.num_cpus, "vCPU a sandbox", run),
        Assumption("memory_gib", limits.memory_mib / 1024, "GiB a sandbox", run),
        _priced(recipe, "vcpu_second", f"{recipe.sandbox.type}_vcpu_second"),
        _priced(recipe, "gib_second", f"{recipe.sandbox.type}_gib_second"),
        *_cases(
            "sandbox_seconds", _seconds(recipe), "s an episode, both sandboxes", source.seconds
        ),
        Assumption("sandbox_factor", 1.0, "times", "no leaks; one published bill needed 4"),
        Assumption("gpus", cluster.nodes * cluster.gpus_per_node, "GPUs", run),
    ]
    if cluster.gpus_per_node:
        rows.append(_priced(recipe, "gpu_hour", f"{cluster.gpu}_hour"))
    else:
        rows.append(Assumption("gpu_hour", 0.0, "$ per GPU-hour", "no GPU in this run"))
    return (*rows, *_cases("step_minutes", _minutes(recipe), "minutes a step", source.minutes))


def _cases(
    key: str, values: tuple[float, float, float], unit: str, source: str
) -> Iterator[Assumption]:
    for name, value in zip(CASES, values, strict=True):
        yield Assumption(f"{key}.{name}", value, unit, source)


def _priced(recipe: Recipe, key: str, name: str) -> Assumption:
    found = price_book(recipe.cost.prices).get(name)
    if found is None:
        return Assumption(key, math.nan, "$", f"no {name} in the price book or cost.prices")
    return Assumption(key, found.value, found.unit, f"{found.source}, {found.date}")


def _seconds(recipe: Recipe) -> tuple[float, float, float]:
    if recipe.cost.sandbox_seconds is not None:
        return recipe.cost.sandbox_seconds
    scale = recipe.budgets.agent_s / EXAMPLE_AGENT_S
    low, mid, high = EXAMPLE_SANDBOX_SECONDS
    return low * scale, mid * scale, high * scale


def _minutes(recipe: Recipe) -> tuple[float, float, float]:
    known = recipe.cluster.gpus_per_node or "step_minutes" in recipe.cost.model_fields_set
    return recipe.cost.step_minutes if known else (0.0, 0.0, 0.0)


def _filter(recipe: Recipe) -> str:
    chosen = recipe.rollout.group_filter
    if chosen == "none":
        return "no rollout.group_filter"
    return f"assumed: {PASSING_SHARE:.0%} pass rollout.group_filter = {chosen}"


def _evaluations(recipe: Recipe) -> tuple[float, str, str]:
    tasks, every = recipe.tasks, recipe.eval.every
    times = 2 + ((recipe.steps - 1) // every if every else 0)
    if tasks.source == "twin":
        num = tasks.num_heldout + tasks.num_unseen
        return times * num, "episodes", f"{times} evaluations of {num} tasks"
    return 0.0, "episodes", "not counted for a task file: set it"
