"""A recipe's cluster section becomes machines; misfits are refused at start."""

from __future__ import annotations

from typing import Any

import pytest

from swerl.cluster.open import trainer_nodes
from swerl.core.errors import RecipeError
from swerl.recipe.schema import Recipe


def _recipe(trainer: dict[str, Any], cluster: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "r", "trainer": trainer, "cluster": cluster})


@pytest.mark.parametrize(
    ("trainer", "cluster", "nodes"),
    [
        ({"ranks": 2}, {}, 1),
        ({"ranks": 64}, {"nodes": 8, "gpus_per_node": 8, "launcher": "ray"}, 8),
        ({"ranks": 32}, {"nodes": 8, "gpus_per_node": 8, "launcher": "ray", "colocate": False}, 4),
    ],
)
def test_ranks_fill_whole_nodes(trainer: dict[str, Any], cluster: dict[str, Any], nodes: int):
    assert trainer_nodes(_recipe(trainer, cluster)) == nodes


@pytest.mark.parametrize(
    ("trainer", "cluster", "error"),
    [
        ({"ranks": 2}, {"nodes": 2}, "cluster.launcher = 'local'"),
        ({"ranks": 3}, {"nodes": 2, "launcher": "ray"}, "does not spread evenly"),
        ({"ranks": 4, "tensor_parallel": 4}, {"nodes": 2, "launcher": "ray"}, "tensor group"),
    ],
)
def test_a_layout_that_nodes_cannot_hold_is_refused(
    trainer: dict[str, Any], cluster: dict[str, Any], error: str
) -> None:
    with pytest.raises(RecipeError, match=error):
        trainer_nodes(_recipe(trainer, cluster))
