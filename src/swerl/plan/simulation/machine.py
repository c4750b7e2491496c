"""The speed of a recipe's machines, from data sheets, the model's shape and assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from swerl.core.errors import RecipeError
from swerl.plan.layout import Layout
from swerl.plan.memory import (
    GPUS,
    GpuModel,
    KvCache,
    recipe_state,
    state_bytes,
    token_bytes,
)
from swerl.plan.parameters import RowCost, model_params, row_cost
from swerl.plan.shape import Shape
from swerl.plan.simulation.engine import Speed
from swerl.plan.simulation.training import trainer_speed
from swerl.recipe.schema import Recipe

_BF16 = 2
_CPU = GpuModel(0.0, bf16_flops=1e11, bytes_per_s=2e10, link_bytes_per_s=1e10)
"""Two cores, roughly."""


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The speeds that the simulation of a schedule needs."""

    num_engines: int
    speed: Speed
    cache_tokens: int
    """Tokens in the cache of one engine."""
    train_s: Callable[[Sequence[int]], float]
    """Lengths of a Batch's rows → seconds of the optimizer step."""
    update_s: float
    """Seconds to load new weights into the engines."""
    switch_s: float = 0.0
    """Seconds per step in which colocated engines and trainer swap memory, both ways."""
    gateway_s: float = 0.0
    """Seconds of the gateway per turn."""
    step_s: float = 0.0
    """Further seconds per step."""
    cores: float = inf
    """CPU cores that sandboxes share, without GPUs with engine and trainer."""
    sandbox_cores: float = 1.0
    """Of these, those of a sandbox while it starts, runs a command or tests."""
    engine_cores: float = 0.0
    trainer_cores: float = 0.0

    def halved(self) -> SimulatedMachine:
        """Return the same GPUs split in half: engines and trainer."""
        whole = self.train_s
        return replace(
            self,
            num_engines=self.num_engines // 2,
            train_s=lambda rows: 2 * whole(rows),
            switch_s=0.0,
        )


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Speed of an engine that is compute-bound in prompts and memory-bound in replies.

    Each decoding round reads the weights that its tokens need (with k of E experts per token, n
    tokens need a fraction 1 - (1 - k/E)^n of the experts on average), all earlier keys and values,
    and the state of linear attention twice.
    """

    prompt: RowCost
    """Seconds of a prompt as a function of its length."""
    dense_s: float
    """Seconds to read all weights except experts."""
    expert_s: float
    """Seconds to read all experts."""
    idle_share: float
    """Fraction of experts that one token does not use."""
    token_s: float
    """Seconds to read the keys and values of one token."""
    state_s: float
    """Seconds to read and write the linear-attention state of one reply."""
    fixed_s: float
    """Fixed seconds of each pass through the layers."""
    reply_s: float = 0.0
    """Seconds of a sampled token's arithmetic; none on a GPU, which waits for its memory."""

    @classmethod
    def of(
        cls, shape: Shape, gpu: GpuModel, num_gpus: int, value: Mapping[str, float]
    ) -> EngineSpeed:
        params, cost = model_params(shape), row_cost(shape)
        rate = 3 * num_gpus * gpu.bf16_flops * value["prompt_mfu"]  # A forward pass is a third.
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
            reply_s=cost.per_token / rate if gpu is _CPU else 0.0,
        )

    def prompt_s(self, cached: int, tokens: int) -> float:
        """Return the seconds to read a prompt whose first `cached` of `tokens` are known."""
        return self.prompt.of(tokens) - self.prompt.of(cached) + self.fixed_s

    def round_s(self, replies: int, tokens: int) -> float:
        """Return the seconds of one more token for each of `replies`, after `tokens` in total."""
        experts = (1 - self.idle_share**replies) * self.expert_s
        read = self.dense_s + experts + tokens * self.token_s + replies * self.state_s
        return read + self.fixed_s + replies * self.reply_s


def machine(
    recipe: Recipe, shape: Shape, layout: Layout, cache: KvCache | None, value: Mapping[str, float]
) -> SimulatedMachine:
    """Return the speeds of a recipe; on CPU only a fit to a real run makes them real.

    Raises RecipeError on an unknown GPU.
    """
    gpu = GPUS.get(recipe.cluster.gpu) if layout.num_gpus else _CPU
    if gpu is None:
        raise RecipeError(
            f"the speed of a {recipe.cluster.gpu!r} is unknown",
            hint=f"known are {', '.join(sorted(GPUS))}",
        )
    size = layout.gpus_per_engine or 1
    weights = model_params(shape).total * _BF16 / size
    whole = recipe.rollout.concurrency * recipe.rollout.max_context_tokens
    cores, threads = value["cores"] or inf, recipe.trainer.ranks * recipe.trainer.threads
    is_cpu = not layout.num_gpus
    return SimulatedMachine(
        num_engines=layout.num_engines,
        speed=EngineSpeed.of(shape, gpu, size, value),
        cache_tokens=cache.tokens if cache else whole,
        train_s=trainer_speed(recipe, shape, layout, gpu, value),
        update_s=weights / value["update_bytes_per_s"] + value["update_fixed_s"],
        switch_s=_switch(recipe, shape, layout, value) if layout.colocated and cache else 0.0,
        gateway_s=value["gateway_s"],
        step_s=value["step_fixed_s"],
        cores=cores,
        sandbox_cores=value["sandbox_cores"],
        engine_cores=float(recipe.engine.options.get("threads", 1)) if is_cpu else 0.0,
        trainer_cores=min(float(threads), cores) if is_cpu else 0.0,
    )


def _switch(recipe: Recipe, shape: Shape, layout: Layout, value: Mapping[str, float]) -> float:
    """Return the seconds to move weights and optimizer state to the host and back."""
    state = recipe_state(recipe, shape, layout)
    moved = 2 * (state.weights + state.optimizer)
    return moved / value["host_bytes_per_s"] + value["switch_fixed_s"]
