"""The parallel layout of a run: which rank holds which part of the model, checked at start.

Attention weights are split over tensor x pipeline ranks, a sequence over context ranks, experts
over expert x expert-tensor x pipeline ranks; the remaining ranks hold copies. Megatron-Core refuses
most illegal sizes too, but minutes later. One it accepts: with one expert rank and unequal tensor
and expert-tensor ranks it trains wrong weights without an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from swerl.core.errors import RecipeError
from swerl.plan.shape import Shape
from swerl.recipe.schema import ClusterSection, Recipe, TrainerSection


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
        return self.num_nodes * self.gpus_per_node

    @property
    def data(self) -> int:
        """Copies of all parameters but routed experts: sequences that train concurrently."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        return self.ranks // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def sequence_parallel(self) -> bool:
        """True if tensor ranks split the positions between their matrices."""
        return self.tensor > 1 and self.gpus_per_node > 0


def crossing(layout: Layout) -> dict[str, int]:
    """Return the groups of which some span nodes, and their sizes.

    Megatron numbers tensor ranks first, then context, data and pipeline ranks; for experts, expert
    tensor and expert ranks first (`parallel_state.initialize_model_parallel`: "tp-cp-ep-dp-pp"). So
    the groups that every layer waits for lie inside a node wherever they fit.
    """
    dense = {"tensor": layout.tensor, "context": layout.context, "data": layout.data}
    experts = {"expert tensor": layout.expert_tensor, "expert": layout.expert}
    crossed = {}
    for axes in (dense | {"pipeline": layout.pipeline}, experts):
        stride = 1
        for name, size in axes.items():
            firsts = (r for r in range(layout.ranks) if r // stride % size == 0)
            last, node = (size - 1) * stride, layout.gpus_per_node or layout.ranks
            if any(first // node != (first + last) // node for first in firsts):
                crossed[name] = size
            stride *= size
    return crossed


def layout(recipe: Recipe, shape: Shape) -> Layout:
    """Return the layout of a recipe.

    Raises RecipeError on the first size that does not fit; the hint names the nearest legal sizes
    on as many ranks, if there are any.
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


def check_layout(recipe: Recipe, shape: Shape) -> None:
    """Raise RecipeError on the first size that does not fit."""
    trainer, cluster = recipe.trainer, recipe.cluster
    _check_ranks(trainer, cluster)
    _check_model(trainer, shape)
    _check_experts(trainer, shape)
    num_engines(trainer, cluster)
    _check_engine(cluster, shape)
    _check_batch(recipe)


def _check_ranks(trainer: TrainerSection, cluster: ClusterSection) -> None:
    num_gpus = cluster.nodes * cluster.gpus_per_node
    if num_gpus and cluster.colocate and trainer.ranks != num_gpus:
        message = f"trainer.ranks = {trainer.ranks}, but the cluster has {num_gpus} GPUs"
        hint = f"set trainer.ranks = {num_gpus}, or cluster.colocate = false to keep some apart"
        raise RecipeError(message, hint=hint)
    if num_gpus and trainer.ranks > num_gpus - (0 if cluster.colocate else 1):
        raise RecipeError(
            f"trainer.ranks = {trainer.ranks} leaves none of {num_gpus} GPUs for an engine",
            hint="lower trainer.ranks or set cluster.colocate = true",
        )
    if not cluster.colocate and cluster.nodes > 1 and trainer.ranks % (cluster.gpus_per_node or 1):
        raise RecipeError(
            f"trainer.ranks = {trainer.ranks} does not fill whole nodes of {cluster.gpus_per_node} "
            "GPUs",
            hint="with cluster.colocate = false several nodes are split node by node",
        )
    tensor, pipeline, context = (
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.context_parallel,
    )
    if trainer.ranks % (tensor * pipeline * context):
        raise RecipeError(
            f"trainer.ranks = {trainer.ranks} is not a multiple of tensor {tensor} x pipeline "
            f"{pipeline} x context {context} = {tensor * pipeline * context}",
            hint="change trainer.ranks or one of the *_parallel keys",
        )
    if num_gpus and tensor > cluster.gpus_per_node:
        raise RecipeError(
            f"trainer.tensor_parallel = {tensor} spans nodes of {cluster.gpus_per_node} GPUs",
            hint="use pipeline_parallel between nodes instead",
        )


def _check_model(trainer: TrainerSection, shape: Shape) -> None:
    tensor = trainer.tensor_parallel
    _divides("trainer.pipeline_parallel", trainer.pipeline_parallel, "layers", shape.num_layers)
    for part, size in (
        ("attention heads", shape.num_heads),
        ("key-value heads", shape.num_kv_heads),
        ("hidden width", shape.hidden_size),
        ("vocabulary", shape.vocab_size),
        ("feed-forward width", _ffn_size(shape)),
        ("shared expert's width", shape.shared_ffn_size),
        ("linear attention's key heads", shape.linear_num_key_heads),
        ("linear attention's value heads", shape.linear_num_value_heads),
    ):
        _divides("trainer.tensor_parallel", tensor, part, size)


def _ffn_size(shape: Shape) -> int:
    """Return the width in use: the config of a mixture-of-experts model may name an unused one."""
    return shape.ffn_size if shape.num_dense_layers or not shape.num_experts else 0


def _check_experts(trainer: TrainerSection, shape: Shape) -> None:
    expert, expert_tensor = trainer.expert_parallel, trainer.expert_tensor_parallel
    if not shape.num_experts:
        if expert > 1:
            message = f"the model {shape.name} has no experts to split"
            hint = "set trainer.expert_parallel = 1"
            raise RecipeError(message, hint=hint)
        return
    _divides("trainer.expert_parallel", expert, "experts", shape.num_experts)
    if expert == 1:
        _divides("trainer.tensor_parallel", expert_tensor, "expert's width", shape.expert_ffn_size)
    part = expert * expert_tensor * trainer.pipeline_parallel
    if trainer.ranks % part:
        raise RecipeError(
            f"trainer.ranks = {trainer.ranks} is not a multiple of expert {expert} x expert tensor "
            f"{expert_tensor} x pipeline {trainer.pipeline_parallel} = {part}",
            hint="change trainer.expert_parallel",
        )


def num_engines(trainer: TrainerSection, cluster: ClusterSection) -> int:
    """Return the number of engines. Raises RecipeError if the GPUs do not divide evenly."""
    if not cluster.gpus_per_node:
        return 1
    num_gpus = cluster.nodes * cluster.gpus_per_node
    free = num_gpus if cluster.colocate else num_gpus - trainer.ranks
    size = cluster.gpus_per_engine
    if free % size:
        raise RecipeError(
            f"{free} GPUs for engines are not a multiple of cluster.gpus_per_engine = {size}",
            hint=f"set gpus_per_engine to a divisor of {free}",
        )
    if cluster.gpus_per_node % size and size % cluster.gpus_per_node:
        raise RecipeError(
            f"engines of {size} GPUs would straddle nodes of {cluster.gpus_per_node}",
            hint="use whole nodes, or a divisor of one node's GPUs",
        )
    return free // size


def _check_engine(cluster: ClusterSection, shape: Shape) -> None:
    if cluster.gpus_per_node:
        size = cluster.gpus_per_engine
        _divides("cluster.gpus_per_engine", size, "attention heads", shape.num_heads)


def _check_batch(recipe: Recipe) -> None:
    rollout, trainer = recipe.rollout, recipe.trainer
    tensor, context = trainer.tensor_parallel, trainer.context_parallel
    episodes = rollout.groups_per_step * rollout.episodes_per_group
    data = trainer.ranks // (tensor * trainer.pipeline_parallel * context)
    if episodes < data:
        raise RecipeError(
            f"{episodes} episodes a step leave some of {data} data-parallel ranks idle",
            hint="raise rollout.groups_per_step, or split models more",
        )
    if trainer.tokens_per_micro_batch * context < rollout.max_context_tokens:
        message = (
            f"tokens_per_micro_batch = {trainer.tokens_per_micro_batch} x context_parallel "
            f"{context} cannot hold a context of {rollout.max_context_tokens} tokens"
        )
        needed = -(-rollout.max_context_tokens // context)
        raise RecipeError(message, hint=f"set trainer.tokens_per_micro_batch to {needed} or more")
    part = 2 * context * tensor
    if context > 1 and rollout.max_context_tokens % part:
        message = (
            f"2 x context {context} x tensor {tensor} = {part} does not divide the context: "
            f"{rollout.max_context_tokens}"
        )
        below = rollout.max_context_tokens // part * part
        raise RecipeError(message, hint=f"set rollout.max_context_tokens = {below}")


def _divides(key: str, value: int, part: str, size: int) -> None:
    if size % value:
        message = f"{key} = {value} does not divide the {part}: {size}"
        below = max(n for n in range(1, value) if size % n == 0)
        raise RecipeError(message, hint=f"{below} does, or change the {part}")


LAYOUT_KEYS = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
)


def nearest(recipe: Recipe, shape: Shape) -> Mapping[str, int]:
    """Return the trainer's keys to change, empty if no other sizes on as many ranks are legal.

    Distance counts doublings and halvings. Ties go to fewer changed keys, then to the layout that
    splits the model more.
    """
    present = {key: getattr(recipe.trainer, key) for key in LAYOUT_KEYS}
    for sizes in sorted(candidates(recipe, shape), key=lambda sizes: _distance(sizes, present)):
        trainer = recipe.trainer.model_copy(update=sizes)
        try:
            check_layout(recipe.model_copy(update={"trainer": trainer}), shape)
        except RecipeError:
            continue
        return {key: size for key, size in sizes.items() if size != present[key]}
    return {}


def candidates(recipe: Recipe, shape: Shape) -> Iterator[dict[str, int]]:
    """Yield sizes that the ranks of a recipe divide into, legal for the model or not."""
    ranks = recipe.trainer.ranks
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    expert_sizes = divisors if shape.num_experts else [1]
    for tensor, pipeline, context in product(divisors, repeat=3):
        if ranks % (tensor * pipeline * context):
            continue
        for expert in expert_sizes:
            if ranks % (expert * pipeline) == 0:
                sizes = (tensor, pipeline, context, expert)
                yield dict(zip(LAYOUT_KEYS, sizes, strict=True))


def _distance(sizes: Mapping[str, int], present: Mapping[str, int]) -> tuple[float, ...]:
    doublings = sum(abs(math.log2(sizes[key] / present[key])) for key in LAYOUT_KEYS)
    changed = sum(sizes[key] != present[key] for key in LAYOUT_KEYS)
    return doublings, changed, -math.prod(sizes.values())
