"""What to change in a recipe whose memory plan does not fit its GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from swerl.core.errors import RecipeError
from swerl.plan.layout import layout
from swerl.plan.layout_rules import check_layout
from swerl.plan.planner import MemoryPlan, plan_memory
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe, TrainerSection

_GROWN = ("expert_parallel", "context_parallel", "pipeline_parallel", "tensor_parallel")
"""Sizes that may be doubled, the one that slows training least first."""
_TIMES = (2, 4, 8)
_ENGINE_HINT = (
    "raise cluster.gpus_per_engine, or give engine.flags another --mem-fraction-static; "
    "or shorten rollout.max_context_tokens"
)
_Changes = dict[str, int | bool]


def check_memory(recipe: Recipe, shape: Shape, found: MemoryPlan, *, reference: bool) -> None:
    """Raise RecipeError where a plan does not fit, with the smallest change found that would."""
    if found.fits:
        return
    phase = found.fullest
    over = found.capacity is not None and phase.total > found.capacity
    if over:
        largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
        message = (
            f"{phase.name} needs {phase.total:.1f} of the {found.capacity:.1f} GiB of an "
            f"{recipe.cluster.gpu.upper()}: {parts}, …"
        )
    else:
        message = (
            f"an engine's cache holds {found.cache.tokens:,} tokens, less than one context of "
            f"{recipe.rollout.max_context_tokens:,}"
        )
    in_engine = not over or phase.name != "train"
    hint = _ENGINE_HINT if in_engine else _hint(recipe, shape, reference=reference)
    raise RecipeError(message, hint=hint)


def _hint(recipe: Recipe, shape: Shape, *, reference: bool) -> str:
    for changes in _changes(recipe):
        trainer = recipe.trainer.model_copy(update=changes)
        changed = recipe.model_copy(update={"trainer": trainer})
        try:
            check_layout(changed, shape)
            found = plan_memory(changed, shape, layout(changed, shape), reference=reference)
        except RecipeError:
            continue
        if found.fits:
            keys = ", ".join(
                f"trainer.{key} = {str(value).lower()}" for key, value in changes.items()
            )
            return f"set {keys}: {found.fullest.total:.1f} GiB at most"
    return "take more or larger GPUs, or raise cluster.gpus_per_engine"


def _changes(recipe: Recipe) -> Iterator[_Changes]:
    """Yield what to try, from what costs nothing in layout to several changes at once."""
    trainer = recipe.trainer
    savers: list[_Changes] = [{}]
    for key in ("recompute", "offload_optimizer"):
        if not getattr(trainer, key):
            savers += [{**saver, key: True} for saver in savers]
    for saver in savers[1:]:
        yield saver
    for saver in savers:
        for times, key in product(_TIMES, _GROWN):
            yield {**saver, **_grown(recipe.trainer, key, times)}
    for saver, pair, times, more in product(savers, combinations(_GROWN, 2), _TIMES, _TIMES):
        key, other = pair
        yield {
            **saver,
            **_grown(recipe.trainer, key, times),
            **_grown(recipe.trainer, other, more),
        }


def _grown(trainer: TrainerSection, key: str, times: int) -> _Changes:
    """Return one size grown. More context ranks need as many fewer tokens on each."""
    changes: _Changes = {key: getattr(trainer, key) * times}
    if key == "context_parallel":
        changes["tokens_per_micro_batch"] = -(-trainer.tokens_per_micro_batch // times)
    return changes
