"""Who holds which part of the model: the parallel layout of a run, checked before it starts.

Attention weights are split over tensor x pipeline ranks, a sequence over context ranks, experts
over expert x expert-tensor x pipeline ranks. What is left over of the ranks holds copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.errors import RecipeError
from swerl.recipe.schema import ClusterSection, Recipe, TrainerSection
from swerl.training.shape import Shape


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
    """Return the layout of a recipe. Raises RecipeError on the first size that does not fit."""
    trainer, cluster = recipe.trainer, recipe.cluster
    _check_ranks(trainer, cluster)
    _check_model(trainer, shape)
    _check_experts(trainer, shape)
    num_engines = _num_engines(trainer, cluster)
    found = Layout(
        num_nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        ranks=trainer.ranks,
        tensor=trainer.tensor_parallel,
        pipeline=trainer.pipeline_parallel,
        context=trainer.context_parallel,
        expert=trainer.expert_parallel,
        expert_tensor=trainer.expert_tensor_parallel,
        num_engines=num_engines,
        gpus_per_engine=cluster.gpus_per_engine if cluster.gpus_per_node else 0,
        colocated=cluster.colocate,
    )
    _check_batch(recipe, found)
    return found


def _check_ranks(trainer: TrainerSection, cluster: ClusterSection) -> None:
    num_gpus = cluster.nodes * cluster.gpus_per_node
    if num_gpus and cluster.colocate and trainer.ranks != num_gpus:
        message = f"trainer.ranks = {trainer.ranks}, but the cluster has {num_gpus} GPUs"
        hint = f"set trainer.ranks = {num_gpus}, or cluster.colocate = false to keep some apart"
        raise RecipeError(message, hint=hint)
    if num_gpus and trainer.ranks > num_gpus - (0 if cluster.colocate else 1):
        message = f"trainer.ranks = {trainer.ranks} leave no GPU for an engine of {num_gpus}"
        raise RecipeError(message, hint="lower trainer.ranks or set cluster.colocate = true")
    tensor, pipeline, context = (
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.context_parallel,
    )
    if trainer.ranks % (tensor * pipeline * context):
        message = (
            f"trainer.ranks = {trainer.ranks} is no multiple of tensor {tensor} x pipeline "
            f"{pipeline} x context {context} = {tensor * pipeline * context}"
        )
        raise RecipeError(message, hint="change trainer.ranks or one of the *_parallel keys")
    if num_gpus and tensor > cluster.gpus_per_node:
        message = f"trainer.tensor_parallel = {tensor} spans nodes of {cluster.gpus_per_node} GPUs"
        raise RecipeError(message, hint="use pipeline_parallel between nodes instead")


def _check_model(trainer: TrainerSection, shape: Shape) -> None:
    tensor = trainer.tensor_parallel
    _divides("trainer.pipeline_parallel", trainer.pipeline_parallel, "layers", shape.num_layers)
    for what, size in (
        ("attention heads", shape.num_heads),
        ("hidden width", shape.hidden_size),
        ("vocabulary", shape.vocab_size),
        ("feed-forward width", 0 if shape.num_experts else shape.ffn_size),
        ("shared expert's width", shape.shared_ffn_size),
        ("linear attention's key heads", shape.linear_num_key_heads),
    ):
        _divides("trainer.tensor_parallel", tensor, what, size)
    if shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        message = (
            f"trainer.tensor_parallel = {tensor} neither divides the model's "
            f"{shape.num_kv_heads} key-value heads nor is a multiple of them"
        )
        raise RecipeError(message, hint=f"set it to a divisor of {shape.num_kv_heads}")


def _check_experts(trainer: TrainerSection, shape: Shape) -> None:
    expert, expert_tensor = trainer.expert_parallel, trainer.expert_tensor_parallel
    if not shape.num_experts:
        if expert > 1 or expert_tensor > 1:
            message = f"the model {shape.name} has no experts to split"
            hint = "set trainer.expert_parallel and expert_tensor_parallel to 1"
            raise RecipeError(message, hint=hint)
        return
    _divides("trainer.expert_parallel", expert, "experts", shape.num_experts)
    _divides(
        "trainer.expert_tensor_parallel", expert_tensor, "expert's width", shape.expert_ffn_size
    )
    part = expert * expert_tensor * trainer.pipeline_parallel
    if trainer.ranks % part:
        message = (
            f"trainer.ranks = {trainer.ranks} is no multiple of expert {expert} x expert tensor "
            f"{expert_tensor} x pipeline {trainer.pipeline_parallel} = {part}"
        )
        raise RecipeError(message, hint="change trainer.expert_parallel")
    if expert == 1 and expert_tensor != trainer.tensor_parallel:
        message = (
            f"expert_parallel = 1 with expert_tensor_parallel = {expert_tensor} and "
            f"tensor_parallel = {trainer.tensor_parallel} trains wrong weights without an error: "
            "Megatron does not reduce the experts' gradients over the ranks in between"
        )
        hint = f"set expert_tensor_parallel = {trainer.tensor_parallel}, or expert_parallel above 1"
        raise RecipeError(message, hint=hint)


def _num_engines(trainer: TrainerSection, cluster: ClusterSection) -> int:
    if not cluster.gpus_per_node:
        return 1
    num_gpus = cluster.nodes * cluster.gpus_per_node
    free = num_gpus if cluster.colocate else num_gpus - trainer.ranks
    size = cluster.gpus_per_engine
    if free % size:
        message = f"{free} GPUs for engines are no multiple of cluster.gpus_per_engine = {size}"
        raise RecipeError(message, hint=f"set gpus_per_engine to a divisor of {free}")
    if cluster.gpus_per_node % size and size % cluster.gpus_per_node:
        message = f"engines of {size} GPUs would straddle nodes of {cluster.gpus_per_node}"
        raise RecipeError(message, hint="use whole nodes, or a divisor of one node's GPUs")
    return free // size


def _check_batch(recipe: Recipe, found: Layout) -> None:
    rollout = recipe.rollout
    episodes = rollout.groups_per_step * rollout.episodes_per_group
    if episodes < found.data:
        message = f"{episodes} episodes a step leave some of {found.data} data-parallel ranks idle"
        raise RecipeError(message, hint="raise rollout.groups_per_step, or split models more")
    fits = recipe.trainer.tokens_per_micro_batch * found.context
    if fits < rollout.max_context_tokens:
        message = (
            f"tokens_per_micro_batch = {recipe.trainer.tokens_per_micro_batch} x context_parallel "
            f"{found.context} cannot hold a context of {rollout.max_context_tokens} tokens"
        )
        needed = -(-rollout.max_context_tokens // found.context)
        raise RecipeError(message, hint=f"set trainer.tokens_per_micro_batch to {needed} or more")
    if found.context > 1:
        part = 2 * found.context * found.tensor
        _divides("2 x context x tensor ranks", part, "context", rollout.max_context_tokens)


def _divides(key: str, value: int, what: str, size: int) -> None:
    if size % value:
        message = f"{key} = {value} does not divide the {what}: {size}"
        below = max(n for n in range(1, value) if size % n == 0)
        raise RecipeError(message, hint=f"{below} does, or change the {what}")
