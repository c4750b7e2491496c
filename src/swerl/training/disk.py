"""How much disk a run fills."""

from __future__ import annotations

from swerl.recipe.schema import Recipe
from swerl.training.parameters import model_params
from swerl.training.shape import shape_of

CHECKPOINT_BYTES = 14
"""Bytes a parameter: weights in bf16, a copy and two moments of the optimizer in fp32."""
WEIGHT_BYTES = 4
"""Bytes a parameter of published weights, at most: fp32."""
KEPT = 3
"""Checkpoints and published versions at once: two that are kept, one being written."""
REST_BYTES = 2 << 30
"""Episodes, turns, samples and logs of a run of a hundred steps."""


def run_bytes(recipe: Recipe) -> int:
    """Return the bytes that a run's folder grows to, roughly and rather too many."""
    num_params = model_params(shape_of(recipe.model)).total
    return num_params * (CHECKPOINT_BYTES + WEIGHT_BYTES) * KEPT + REST_BYTES
