"""The legal parallel sizes that are nearest to those of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

from swerl.core.errors import RecipeError
from swerl.plan.layout_rules import check_layout
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

_KEYS = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)


def nearest(recipe: Recipe, shape: Shape) -> Mapping[str, int]:
    """Return the trainer's keys to change, empty where no other sizes on as many ranks are legal.

    Near are layouts whose sizes are few doublings or halvings away. Of those as near, one that
    changes fewer keys comes first, then one that splits the model more, experts whole.
    """
    given = {key: getattr(recipe.trainer, key) for key in _KEYS}
    for sizes in sorted(_candidates(recipe, shape), key=lambda sizes: _distance(sizes, given)):
        trainer = recipe.trainer.model_copy(update=sizes)
        try:
            check_layout(recipe.model_copy(update={"trainer": trainer}), shape)
        except RecipeError:
            continue
        return {key: size for key, size in sizes.items() if size != given[key]}
    return {}


def _candidates(recipe: Recipe, shape: Shape) -> Iterator[dict[str, int]]:
    ranks = recipe.trainer.ranks
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    expert_sizes = divisors if shape.num_experts else [1]
    for tensor, pipeline, context in product(divisors, repeat=3):
        if ranks % (tensor * pipeline * context):
            continue
        for expert, expert_tensor in product(expert_sizes, repeat=2):
            if ranks % (expert * expert_tensor * pipeline) == 0:
                sizes = (tensor, pipeline, context, expert, expert_tensor)
                yield dict(zip(_KEYS, sizes, strict=True))


def _distance(sizes: Mapping[str, int], given: Mapping[str, int]) -> tuple[float, ...]:
    doublings = sum(abs(math.log2(sizes[key] / given[key])) for key in _KEYS)
    changed = sum(sizes[key] != given[key] for key in _KEYS)
    return doublings, changed, -math.prod(sizes.values()), sizes["expert_tensor_parallel"]
