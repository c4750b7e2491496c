"""Suggest other values of a recipe's keys that fit and make its simulated run faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swerl.core.errors import RecipeError
from swerl.plan.layout import layout, nearest
from swerl.plan.memory import plan_memory
from swerl.plan.shape import Shape
from swerl.plan.simulation import Simulation, simulate
from swerl.recipe.check import check_settings
from swerl.recipe.schema import Recipe

WORTH = 1.15
"""Gain from which a change is suggested."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Other values of some keys, and their gain in rollouts a GPU-hour."""

    changes: Mapping[str, tuple[Any, Any]]
    """Key → (new value, the recipe's value)."""
    gain: float
    note: str = ""


def suggestions(recipe: Recipe, shape: Shape, simulated: Simulation) -> list[Suggestion]:
    """Return the changes that fit and make the run faster, best first."""
    gains = []
    for changes, note in _candidates(recipe, shape):
        changes = {key: value for key, value in changes.items() if value != _value(recipe, key)}
        other = _changed(recipe, changes)
        try:
            check_settings(other)
            sizes = layout(other, shape)
            memory = plan_memory(other, shape, sizes)
        except RecipeError:
            continue
        if not memory.fits:
            continue
        faster = simulate(other, shape, sizes, memory.cache)
        gain = faster.rollouts_per_gpu_hour / simulated.rollouts_per_gpu_hour
        if gain >= WORTH:
            both = {key: (value, _value(recipe, key)) for key, value in changes.items()}
            gains.append(Suggestion(both, gain, note))
    return sorted(gains, key=lambda suggestion: -suggestion.gain)


def _candidates(recipe: Recipe, shape: Shape) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield changes to try, and the reason to think twice about them."""
    rollout, cluster = recipe.rollout, recipe.cluster
    episodes = rollout.groups_per_step * rollout.episodes_per_group
    if rollout.concurrency < episodes:
        yield {"rollout.concurrency": episodes}, "as many sandboxes at once"
    yield {"rollout.groups_per_step": 2 * rollout.groups_per_step}, "the batch changes learning"
    for size in {cluster.gpus_per_engine // 2, 2 * cluster.gpus_per_engine} - {0}:
        yield {"cluster.gpus_per_engine": size}, ""
    if recipe.schedule.mode == "async":
        yield {"schedule.pool": 2 * recipe.schedule.pool}, ""
        return
    half = cluster.nodes * cluster.gpus_per_node // 2
    if not half:
        return
    changes: dict[str, Any] = {"schedule.mode": "async", "cluster.colocate": False}
    if cluster.colocate:
        changes["trainer.ranks"] = half
        sizes = nearest(_changed(recipe, changes), shape)
        changes |= {f"trainer.{key}": size for key, size in sizes.items()}
        context = sizes.get("context_parallel", recipe.trainer.context_parallel)
        changes["trainer.tokens_per_micro_batch"] = -(-rollout.max_context_tokens // context)
    yield changes, "engines sample with weights that are some steps old"


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updates = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()
    }
    return recipe.model_copy(update=updates)


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)
