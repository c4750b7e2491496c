"""How fast a recipe's machines are, from their data sheets, the model's shape and assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from swerl.core.errors import RecipeError
from swerl.plan.layout import Layout
from swerl.plan.memory import BF16, GPUS, Gpu, KvCache, state_bytes, token_bytes, training_state
from swerl.plan.parameters import RowCost, model_params, rank_params, row_cost
from swerl.plan.shape import Shape
from swerl.plan.simulation.engine import Speed
from swerl.recipe.schema import Recipe

_BF16 = 2


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """Everything that the schedule of a run needs to know."""

    num_engines: int
    speed: Speed
    cache_tokens: int
    """Of one engine."""
    train_s: Callable[[Sequence[int]], float]
    """Lengths of a Batch's rows -> seconds of the optimizer step."""
    update_s: float
    """New weights to the engines."""
    switch_s: float = 0.0
    """Engines and trainer making room for each other, both ways; 0 with GPUs of their own."""
    gateway_s: float = 0.0
    """Of each turn."""
    step_s: float = 0.0
    """Of each step besides."""

    def halved(self) -> SimulatedMachine:
        """Return the same GPUs, half of them for engines and half for the trainer."""
        whole = self.train_s
        return replace(
            self,
            num_engines=self.num_engines // 2,
            train_s=lambda rows: 2 * whole(rows),
            switch_s=0.0,
        )


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """An engine bound by arithmetic in prompts, and by memory in replies.

    A reply's round reads the weights that its tokens need (of E experts, k a token, n tokens need
    1 - (1 - k/E)^n of them on average), every key and value in front, and linear attention's state
    twice.
    """

    prompt: RowCost
    """Seconds of a prompt by its length."""
    dense_s: float
    """Reading all weights but the experts."""
    expert_s: float
    """Reading all experts."""
    idle_share: float
    """Of the experts, for one token."""
    token_s: float
    """Reading one token's keys and values."""
    state_s: float
    """Reading and writing one reply's state of linear attention."""
    fixed_s: float
    """Of each pass through the layers."""

    @classmethod
    def of(cls, shape: Shape, gpu: Gpu, num_gpus: int, value: Mapping[str, float]) -> EngineSpeed:
        """Return the speed of an engine of this many GPUs."""
        params, cost = model_params(shape), row_cost(shape)
        rate = 3 * num_gpus * gpu.bf16_flops * value["prompt_mfu"]  # a forward pass is a third
        bandwidth = gpu.bytes_per_s * value["bandwidth_share"]
        weight_s = _BF16 / num_gpus / bandwidth
        return cls(
            prompt=RowCost(cost.per_token / rate, cost.per_token_pair / rate),
            dense_s=(params.total - params.expert) * weight_s,
            expert_s=params.expert * weight_s,
            idle_share=1 - shape.experts_per_token / (shape.num_experts or 1),
            token_s=token_bytes(shape, num_gpus) / bandwidth,
            state_s=2 * state_bytes(shape, num_gpus) / bandwidth,
            fixed_s=shape.num_layers * value["layer_s"],
        )

    def prompt_s(self, cached: int, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens`, the first `cached` of them known."""
        return self.prompt.of(tokens) - self.prompt.of(cached) + self.fixed_s

    def round_s(self, replies: int, tokens: int) -> float:
        """Return the seconds of one token more for each of `replies`, with `tokens` in front."""
        experts = (1 - self.idle_share**replies) * self.expert_s
        read = self.dense_s + experts + tokens * self.token_s + replies * self.state_s
        return read + self.fixed_s


def machine(
    recipe: Recipe, shape: Shape, layout: Layout, cache: KvCache, value: Mapping[str, float]
) -> SimulatedMachine:
    """Return the machine of a GPU recipe. Raises RecipeError on a GPU that is not known."""
    gpu = GPUS.get(recipe.cluster.gpu)
    if gpu is None:
        raise RecipeError(
            f"the speed of a {recipe.cluster.gpu!r} is not known",
            hint=f"known are {', '.join(sorted(GPUS))}",
        )
    weights = model_params(shape).total * _BF16 / layout.gpus_per_engine
    return SimulatedMachine(
        num_engines=layout.num_engines,
        speed=EngineSpeed.of(shape, gpu, layout.gpus_per_engine, value),
        cache_tokens=cache.tokens,
        train_s=_training(recipe, shape, layout, gpu, value),
        update_s=weights / value["update_bytes_per_s"] + value["update_fixed_s"],
        switch_s=_switch(shape, layout, value) if layout.colocated else 0.0,
        gateway_s=value["gateway_s"],
        step_s=value["step_fixed_s"],
    )


def _training(
    recipe: Recipe, shape: Shape, layout: Layout, gpu: Gpu, value: Mapping[str, float]
) -> Callable[[Sequence[int]], float]:
    """A third of the arithmetic once more for a forward pass that is repeated. MFU counts it not:
    it is of the model's own operations."""
    cost = row_cost(shape)
    repeated = 4 / 3 if recipe.trainer.recompute else 1.0
    rate = layout.ranks * gpu.bf16_flops * value["train_mfu"] * (1 - value["imbalance"])
    adam = 0.0
    if recipe.trainer.offload_optimizer:
        owned = model_params(shape).total / layout.num_nodes
        adam = owned / value["host_adam_per_s"]
    return lambda rows: repeated * sum(map(cost.of, rows)) / rate + adam


def _switch(shape: Shape, layout: Layout, value: Mapping[str, float]) -> float:
    """Weights and optimizer to the host and back."""
    state = training_state(rank_params(shape, layout), layout, BF16)
    moved = 2 * (state.weights + state.optimizer)
    return moved / value["host_bytes_per_s"] + value["switch_fixed_s"]
