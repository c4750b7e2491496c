"""The memory of one GPU in each phase of a step, and of one node's host, before anything starts.

Colocated, engine and trainer take turns: what the trainer does not need in a phase lies in the
host's memory, and the engine drops its weights and cache while the trainer works. With GPUs of
their own each phase has its own GPU. Assumptions that no formula gives are constants with a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swerl.plan.activations import activation_bytes, logit_bytes
from swerl.plan.gpus import GPUS
from swerl.plan.kv_cache import KvCache, kv_cache
from swerl.plan.layout import Layout
from swerl.plan.parameters import RankParams, rank_params
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

CONTEXT_GIB = 1.5
"""CUDA's context, kernels and cuBLAS's workspace, for each process on a GPU. Assumed."""
COLLECTIVES_GIB = 1.5
"""NCCL's channels and buffers of all groups of a rank. Assumed."""
ENGINE_WORK_GIB = 4.0
"""The engine's CUDA graphs and the activations of a chunk of prompt. Assumed."""
BUCKET_GIB = 1.0
"""One bucket of weights on its way to an engine; two are alive at once. Assumed."""
GAPS = 0.05
"""The allocator's gaps, as a share of what it gave to the trainer. Assumed."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter in training."""

    weight: int
    gradient: int
    optimizer: int
    """Master copy and Adam's two moments, on the rank that owns them."""
    master: int
    """Of these, the master copy: it stays on the GPU when the moments are offloaded."""


BF16 = Precision(weight=2, gradient=4, optimizer=12, master=4)
"""bf16 weights, fp32 gradients, fp32 master weights and moments (Megatron-Core's distributed
optimizer; Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1, with fp32 gradients)."""
FP32 = Precision(weight=4, gradient=4, optimizer=8, master=0)
"""fp32 throughout: the weights are their own master copy."""

PRECISIONS = {"bf16": BF16, "fp32": FP32}
"""By `trainer.dtype`."""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of what a rank holds from step to step."""

    weights: float
    gradients: float
    optimizer: float
    master: float
    """Of the optimizer: the master copy."""


@dataclass(frozen=True, slots=True)
class Phase:
    """GiB of one GPU in one phase of a step."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """GiB of one GPU in every phase, of one node's host, and the engine's cache."""

    phases: tuple[Phase, ...]
    """Rollout, training, weight update."""
    host: float
    """Of one node, in pinned memory."""
    cache: KvCache
    capacity: float | None
    """Of one GPU; None where it is not known."""

    @property
    def fullest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def train(self) -> Phase:
        """The phase of forward, backward and optimizer."""
        return next(phase for phase in self.phases if phase.name == "train")

    @property
    def fits(self) -> bool:
        """Whether every phase fits the GPU, and a whole context the engine's cache."""
        if self.capacity is None:
            return True
        return self.fullest.total <= self.capacity and self.cache.contexts >= 1


def plan_memory(
    recipe: Recipe, shape: Shape, layout: Layout, *, reference: bool = False
) -> MemoryPlan:
    """Plan the memory of a GPU run. `reference` counts a frozen copy of the weights.

    A GPU that the price book does not know is planned as an H100, without a verdict.
    """
    gpu = GPUS.get(recipe.cluster.gpu)
    capacity = gpu.memory_gib if gpu else None
    cache = kv_cache(recipe, shape, layout, gpu_gib=capacity or GPUS["h100"].memory_gib)
    precision = PRECISIONS[recipe.trainer.dtype]
    state = training_state(rank_params(shape, layout), layout, precision)
    offload = recipe.trainer.offload_optimizer
    train = _train(recipe, shape, layout, state) | {
        "reference": state.weights / _GIB if reference else 0.0
    }
    rest = CONTEXT_GIB if layout.colocated else 0.0
    rollout = {
        "weights": cache.weights,
        "KV cache": cache.pool,
        "engine's work": ENGINE_WORK_GIB,
        "contexts": CONTEXT_GIB + rest,
    }
    return MemoryPlan(
        phases=(
            Phase("rollout", rollout),
            Phase("train", train),
            Phase("update", _update(layout, state, cache, train)),
        ),
        host=_host(layout, state, offload=offload, saving=recipe.trainer.async_save),
        cache=cache,
        capacity=capacity,
    )


def training_state(params: RankParams, layout: Layout, precision: Precision = BF16) -> State:
    """Return what a rank holds: optimizer states are shared out over the copies of a parameter."""
    owned = params.dense / (layout.data * layout.context) + params.expert / layout.expert_data
    return State(
        weights=params.total * precision.weight,
        gradients=params.total * precision.gradient,
        optimizer=owned * precision.optimizer,
        master=owned * precision.master,
    )


def _train(recipe: Recipe, shape: Shape, layout: Layout, state: State) -> dict[str, float]:
    trainer = recipe.trainer
    positions = trainer.tokens_per_micro_batch
    wider = PRECISIONS[trainer.dtype].weight / BF16.weight
    held = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.master if trainer.offload_optimizer else state.optimizer,
        "activations": wider
        * activation_bytes(shape, layout, positions=positions, recompute=trainer.recompute),
        "logits": logit_bytes(shape, layout, positions=positions),
    }
    parts = {name: number / _GIB for name, number in held.items()}
    parts["gaps"] = GAPS * sum(parts.values())
    processes = 2 if layout.colocated else 1
    return parts | {"contexts": processes * CONTEXT_GIB + COLLECTIVES_GIB}


def _update(
    layout: Layout, state: State, cache: KvCache, train: Mapping[str, float]
) -> dict[str, float]:
    """Colocated: both copies of the weights and buckets. Else buckets on top of what stays."""
    if layout.colocated:
        return {
            "weights": state.weights / _GIB,
            "engine's weights": cache.weights,
            "buckets": 2 * BUCKET_GIB,
            "contexts": 2 * CONTEXT_GIB + COLLECTIVES_GIB,
        }
    stays = ("weights", "gradients", "optimizer", "reference", "contexts")
    return {name: train[name] for name in stays} | {"buckets": 2 * BUCKET_GIB}


def _host(layout: Layout, state: State, *, offload: bool, saving: bool) -> float:
    """Offloaded, the optimizer's moments; colocated, weights and states wait there. A checkpoint
    that is written while training goes on is a copy of the states."""
    waits = state.weights + state.optimizer if layout.colocated else 0.0
    held = max(waits, state.optimizer - state.master if offload else 0.0)
    return layout.gpus_per_node * (held + saving * state.optimizer) / _GIB
