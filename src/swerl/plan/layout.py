"""Who holds which part of the model: the parallel layout of a run, checked before it starts.

Attention weights are split over tensor x pipeline ranks, a sequence over context ranks, experts
over expert x expert-tensor x pipeline ranks. What is left over of the ranks holds copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.core.errors import RecipeError
from swerl.plan.layout_nearest import nearest
from swerl.plan.layout_rules import check_layout, num_engines
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of every group of ranks, and the engines."""

    num_nodes: int
    gpus_per_node: int
    """0 on CPU."""
    ranks: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    num_engines: int
    gpus_per_engine: int
    colocated: bool

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run."""
        return self.num_nodes * self.gpus_per_node

    @property
    def data(self) -> int:
        """Copies of everything but the routed experts: how many sequences train at once."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Copies of the routed experts."""
        return self.ranks // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor ranks split the positions between their matrices."""
        return self.tensor > 1 and self.gpus_per_node > 0


def layout(recipe: Recipe, shape: Shape) -> Layout:
    """Return the layout of a recipe; starts nothing.

    Raises RecipeError on the first size that does not fit. Where other parallel sizes on as many
    ranks would, the hint names the nearest.
    """
    try:
        check_layout(recipe, shape)
    except RecipeError as error:
        changes = nearest(recipe, shape)
        if changes:
            sizes = ", ".join(f"trainer.{key} = {size}" for key, size in changes.items())
            error.hint = f"{error.hint}. The nearest layout that fits: {sizes}"
        raise
    trainer, cluster = recipe.trainer, recipe.cluster
    return Layout(
        num_nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        ranks=trainer.ranks,
        tensor=trainer.tensor_parallel,
        pipeline=trainer.pipeline_parallel,
        context=trainer.context_parallel,
        expert=trainer.expert_parallel,
        expert_tensor=trainer.expert_tensor_parallel,
        num_engines=num_engines(trainer, cluster),
        gpus_per_engine=cluster.gpus_per_engine if cluster.gpus_per_node else 0,
        colocated=cluster.colocate,
    )
