"""Plan the memory of one GPU in each phase of a step, of the engine's cache, and of a node's host.

Colocated engine and trainer take turns: outside of a step the trainer's tensors are in host memory
(`training/rank/sleep.py`), and the engine drops weights and cache while the trainer works. The
contexts of both processes, the trainer's collectives and the engine's graphs stay on the GPU.
Otherwise each phase has its own GPU. Assumptions that no formula gives are named constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

from swerl.core.errors import RecipeError
from swerl.plan.activations import activation_bytes, logit_bytes
from swerl.plan.layout import Layout
from swerl.plan.parameters import RankParams, model_params, rank_params
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

_SHARE_FLAG = "--mem-fraction-static"
_BATCH_FLAG = "--cuda-graph-max-bs-decode"
_HEAD_FLAG = "--enable-fp32-lm-head"
"""Logits in fp32: rounded to bf16, they move a sampled token's log-probability by 0.006 to 0.019 on
average (random weights, hidden size 2,048, largest logit 10 to 20)."""
_CONFIG_FLAG = "--json-model-override-args"
_BF16 = 2
_FP32 = 4
_INT32 = 4


CONTEXT_GIB = 1.5
"""CUDA context, kernels and cuBLAS workspace of each process on a GPU. Assumed."""
COMMUNICATOR_GIB = 1.0
"""NCCL's channels and buffers of one group of ranks, which stay while the trainer sleeps. On eight
H100 verl measured 7 GB a rank in six groups, and 9.5 GB in nine with experts (issue 6266).
`NCCL_CUMEM_ENABLE=0`, as the ranks have it, may lower it."""
KERNELS_GIB = 0.5
"""Compiled kernels and workspaces of cuBLAS, which grow during the first steps. Assumed."""
GRAPH_POOL_GIB = 1.0
"""Activations in the pool of the engine's CUDA graphs, which stay while it sleeps. Assumed."""
CHUNK_GIB = 2.0
"""Activations of one prompt chunk, where `engine.flags` set the engine's share. Assumed."""
STATE_RATIO = 0.9
"""Memory of linear-attention states over that of keys and values: SGLang's
`--mamba-full-memory-ratio`."""
STATES_PER_REQUEST = 5
"""States that SGLang keeps for a running request of a hybrid model: three, and two for its overlap
schedule (`mem_cache/kv_cache_configurator.py: _calculate_mamba_ratio`)."""
GATHERED = 3
"""Copies of the largest tensor while it is gathered: the ranks' parts, their pieces, the whole."""
BUCKET_GIB = 1.0
"""One bucket of weights sent to an engine; two exist at a time. Assumed."""
GAPS = 0.05
"""Fragmentation, as a fraction of the trainer's allocations. Assumed."""
_GIB = 2**30
_ENGINE_HINT = (
    f"raise cluster.gpus_per_engine, or give engine.flags another {_SHARE_FLAG}; "
    "or shorten rollout.max_context_tokens"
)
_TRAINER_HINT = (
    "raise trainer.expert_parallel, context_parallel (with fewer tokens_per_micro_batch) or "
    "tensor_parallel; set trainer.recompute or offload_optimizer; or use more or larger GPUs"
)


@dataclass(frozen=True, slots=True)
class KvCache:
    """The memory of one GPU of an engine in GiB, and its capacity."""

    weights: float
    pool: float
    """Keys, values and states of linear attention."""
    graphs: float
    """CUDA graphs, which stay while the engine sleeps."""
    work: float
    """Graphs, and activations of one prompt chunk."""
    share: float
    """Weights and pool, as a fraction of the memory that is free when the engine starts."""
    batch: int
    """Replies in the largest CUDA graph."""
    running: int | None
    """Requests that the states of linear attention allow at once; None without such layers."""
    tokens: int
    """Tokens that fit into the engine's cache."""
    contexts: float
    """The same, in contexts of full length."""
    sequences: int
    """Episodes that the engine serves concurrently."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter in training."""

    weight: int
    gradient: int
    optimizer: int
    """Master copy and Adam's two moments, on the rank that owns them."""
    master: int
    """The master copy's part of these; it stays on the GPU when the moments are offloaded."""


BF16 = Precision(weight=2, gradient=4, optimizer=12, master=4)
"""bf16 weights, fp32 gradients, fp32 master weights and moments (Megatron-Core's distributed
optimizer; Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1, with fp32 gradients)."""
FP32 = Precision(weight=4, gradient=4, optimizer=8, master=0)
"""fp32 throughout: the weights are their own master copy."""

PRECISIONS = {"bf16": BF16, "fp32": FP32}
"""By `trainer.dtype`."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Bytes that a rank holds from step to step."""

    weights: float
    gradients: float
    optimizer: float
    master: float
    """The master copy's part of the optimizer."""


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """GiB of one GPU in one phase of a step."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """GiB of one GPU in every phase, of one node's host, and the engine's cache."""

    phases: tuple[MemoryPhase, ...]
    """Rollout, training, weight update."""
    host: float
    """GiB of pinned memory per node."""
    cache: KvCache
    capacity: float | None
    """GiB of one GPU; None if unknown."""

    @property
    def fullest(self) -> MemoryPhase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def train(self) -> MemoryPhase:
        """The phase of forward, backward and optimizer."""
        return next(phase for phase in self.phases if phase.name == "train")

    @property
    def fits(self) -> bool:
        """True if every phase fits the GPU, and the engine's cache holds a whole context."""
        if self.capacity is None:
            return True
        return self.fullest.total <= self.capacity and self.cache.contexts >= 1


def plan_memory(
    recipe: Recipe, shape: Shape, layout: Layout, *, reference: bool = False
) -> MemoryPlan:
    """Plan the memory of a GPU run. `reference` adds a frozen copy of the weights.

    An unknown GPU is planned as an H100, without a verdict.
    """
    gpu = GPUS.get(recipe.cluster.gpu)
    capacity = gpu.memory_gib if gpu else None
    cache = kv_cache(recipe, shape, layout, gpu_gib=capacity or GPUS["h100"].memory_gib)
    precision = PRECISIONS[recipe.trainer.dtype]
    state = recipe_state(recipe, shape, layout, precision)
    offload = recipe.trainer.offload_optimizer
    train = _train(recipe, shape, layout, state, cache) | {
        "reference": state.weights / _GIB if reference else 0.0
    }
    rollout = {
        "weights": cache.weights,
        "KV cache": cache.pool,
        "engine's work": cache.work,
        "contexts": CONTEXT_GIB + _asleep_gib(layout),
    }
    return MemoryPlan(
        phases=(
            MemoryPhase("rollout", rollout),
            MemoryPhase("train", train),
            MemoryPhase("update", _update(layout, shape, cache, train)),
        ),
        host=_host(
            layout, state, offload=offload, saving=recipe.trainer.async_save, reference=reference
        )
        + _recorded_gib(recipe, shape, layout, cache),
        cache=cache,
        capacity=capacity,
    )


def recipe_state(
    recipe: Recipe, shape: Shape, layout: Layout, precision: Precision = BF16
) -> TrainingState:
    """Return the state of one rank of a recipe, which may train only adapters."""
    params, lora = rank_params(shape, layout), recipe.trainer.lora
    adapters = rank_params(shape, layout, lora) if lora.rank else None
    return training_state(params, layout, precision, adapters=adapters)


def training_state(
    params: RankParams,
    layout: Layout,
    precision: Precision = BF16,
    *,
    adapters: RankParams | None = None,
) -> TrainingState:
    """Return the state of one rank; a parameter's copies share its optimizer state evenly.

    With adapters the parameters are frozen: they have neither gradients nor an optimizer.
    """
    trained = adapters or params
    owned = trained.dense / (layout.data * layout.context) + trained.expert / layout.expert_data
    frozen = params.total if adapters else 0
    return TrainingState(
        weights=(frozen + trained.total) * precision.weight,
        gradients=trained.total * precision.gradient,
        optimizer=owned * precision.optimizer,
        master=owned * precision.master,
    )


def _asleep_gib(layout: Layout) -> float:
    """Return the memory that a sleeping trainer keeps on an engine's GPU."""
    return CONTEXT_GIB + communicators_gib(layout) if layout.colocated else 0.0


def communicators_gib(layout: Layout) -> float:
    """Return the memory of a rank's NCCL groups: of all ranks, and one of each split."""
    splits = (
        layout.ranks,
        layout.tensor,
        layout.context,
        layout.tensor * layout.context if layout.context > 1 else 1,
        layout.data * layout.context,
        layout.pipeline,
        layout.pipeline * layout.tensor if layout.pipeline > 1 else 1,
        layout.pipeline,  # of both ends, for tied embeddings
        layout.expert,
        layout.expert_data if layout.expert > 1 else 1,
        layout.expert * layout.tensor if layout.expert > 1 else 1,
    )
    return COMMUNICATOR_GIB * sum(size > 1 for size in splits)


def _train(
    recipe: Recipe, shape: Shape, layout: Layout, state: TrainingState, cache: KvCache
) -> dict[str, float]:
    trainer = recipe.trainer
    positions = trainer.tokens_per_micro_batch
    wider = PRECISIONS[trainer.dtype].weight / BF16.weight
    sizes = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.master if trainer.offload_optimizer else state.optimizer,
        "activations": wider
        * activation_bytes(
            shape,
            layout,
            positions=positions,
            recompute=trainer.recompute,
            shared=trainer.shared_prefixes,
        ),
        "logits": logit_bytes(shape, layout, positions=positions),
    }
    parts = {name: number / _GIB for name, number in sizes.items()}
    parts["gaps"] = GAPS * sum(parts.values())
    contexts = CONTEXT_GIB + KERNELS_GIB + communicators_gib(layout)
    if layout.colocated:
        return parts | {"contexts": contexts + CONTEXT_GIB, "engine's graphs": cache.graphs}
    return parts | {"contexts": contexts}


def _update(
    layout: Layout, shape: Shape, cache: KvCache, train: Mapping[str, float]
) -> dict[str, float]:
    """Colocated: the engine's weights, while the trainer's come from the host one by one. Else the
    training state. In both cases a gathered tensor and buckets."""
    sent = {"gathered tensor": _gathered(shape) / _GIB, "buckets": 2 * BUCKET_GIB}
    if layout.colocated:
        both = {name: train[name] for name in ("contexts", "engine's graphs")}
        return {"engine's weights": cache.weights} | sent | both
    stays = ("weights", "gradients", "optimizer", "reference", "contexts")
    return {name: train[name] for name in stays} | sent


def _gathered(shape: Shape) -> float:
    """Return the bytes of the largest tensor while it is gathered."""
    experts = shape.num_experts * 2 * shape.expert_ffn_size
    return GATHERED * max(shape.vocab_size, experts) * shape.hidden_size * _BF16


def _host(
    layout: Layout, state: TrainingState, *, offload: bool, saving: bool, reference: bool
) -> float:
    """The host holds offloaded moments; colocated, also weights, reference and the whole state
    between steps. A checkpoint that is written during training is a copy of the state."""
    weights = state.weights * (2 if reference else 1)
    waits = weights + state.optimizer if layout.colocated else 0.0
    asleep = max(waits, state.optimizer - state.master if offload else 0.0)
    return layout.gpus_per_node * (asleep + saving * state.optimizer) / _GIB


def _recorded_gib(recipe: Recipe, shape: Shape, layout: Layout, cache: KvCache) -> float:
    """Return the pinned memory in which SGLang records chosen experts: every GPU of an engine has a
    place for each token of its cache (`state_capturer/base.py: BaseHostCache`)."""
    if not recipe.engine.options.get("routed_experts"):
        return 0.0
    token = shape.num_layers * shape.experts_per_token * _INT32
    return layout.gpus_per_node * cache.tokens * token / _GIB


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU."""

    memory_gib: float
    """As CUDA reports it."""
    bf16_flops: float
    """Dense bf16 matrix operations per second, from the data sheet."""
    bytes_per_s: float
    """Memory bandwidth, from the data sheet."""
    link_bytes_per_s: float
    """NVLink in one direction, from the data sheet."""


GPUS = {
    "a100": GpuModel(79.2, 312e12, 2.04e12, 300e9),
    "h100": GpuModel(79.1, 989e12, 3.35e12, 450e9),
    "h200": GpuModel(139.8, 989e12, 4.8e12, 450e9),
    "b200": GpuModel(178.4, 2250e12, 8.0e12, 900e9),
}
"""SXM versions, with NVIDIA's peaks without sparsity. A real matrix product reaches about 70 % of
the peak, so a fraction of the peak understates how busy a GPU is."""


def kv_cache(recipe: Recipe, shape: Shape, layout: Layout, *, gpu_gib: float) -> KvCache:
    """Return the capacity of an engine's part of a GPU.

    A token keeps a key and a value for every key-value head of every attention layer, in bf16 (Kwon
    et al. 2023, arXiv 2309.06180, section 3.1); heads are split over the engine's GPUs, never below
    one. SGLang 0.5.21 gives linear attention's states, each with the convolution's last inputs, a
    fixed part of the pool (`mem_cache/kv_cache_configurator.py: _handle_max_mamba_cache`).
    """
    size = layout.gpus_per_engine
    weights = model_params(shape).total * _BF16 / size / _GIB
    sequences = -(-recipe.rollout.concurrency // layout.num_engines)
    batch = _graph_batch(recipe, size, sequences)
    # SGLang measures the free memory at its start: a sleeping trainer's is gone from it.
    free = gpu_gib - CONTEXT_GIB - _asleep_gib(layout)
    graphs = _captured_gib(gpu_gib, batch) + GRAPH_POOL_GIB
    flag = _flag(recipe, _SHARE_FLAG)
    if flag is None:
        work = _reserved_gib(gpu_gib, size, batch)
        share = max(0.001, floor(1000 * (1 - work / free)) / 1000)
    else:
        work, share = graphs + CHUNK_GIB, _fraction(flag)
    pool = max(0.0, share * free - weights)
    free_bytes, running = pool * _GIB, None
    if state := state_bytes(shape, size):
        states = max(0, int(free_bytes * STATE_RATIO / (1 + STATE_RATIO) / state) - 1)
        running = states // STATES_PER_REQUEST
        free_bytes -= (states + 1) * state  # one more is padding
    tokens = max(0, int(free_bytes / token_bytes(shape, size)))
    return KvCache(
        weights=weights,
        pool=pool,
        graphs=graphs,
        work=work,
        share=share,
        batch=batch,
        running=running,
        tokens=tokens,
        contexts=tokens / recipe.rollout.max_context_tokens,
        sequences=sequences,
    )


def _captured_gib(gpu_gib: float, batch: int) -> float:
    """Return the memory of CUDA graphs outside of torch's pools, as `_reserved_gib` counts it."""
    num_prompt_graphs = 74 if gpu_gib > 160 else 58
    return (2 * batch + 8 * num_prompt_graphs) / 1024


def _reserved_gib(gpu_gib: float, num_gpus: int, batch: int) -> float:
    """Return the memory that SGLang 0.5.21 keeps free of weights and cache by default.

    In MiB: 512, 1.5 a token of a prompt chunk, 128 a GPU, 2 a reply of the largest graph, and 8 a
    graph of prompts (`arg_groups/memory_hook.py: handle_gpu_memory_settings`).
    """
    chunk = 16_384 if gpu_gib > 160 else 8_192
    return _captured_gib(gpu_gib, batch) + (512 + 1.5 * chunk + 128 * num_gpus) / 1024


def _graph_batch(recipe: Recipe, num_gpus: int, sequences: int) -> int:
    """Return the replies of the largest graph: twice an engine's mean load, as sessions spread
    unevenly, and at most SGLang's own default."""
    flag = _flag(recipe, _BATCH_FLAG)
    if flag and flag.isdecimal():
        return int(flag)
    return min(max(16, 2 * sequences), 256 if num_gpus < 4 else 512)


def engine_flags(recipe: Recipe, shape: Shape, planned: MemoryPlan) -> tuple[str, ...]:
    """Return the flags that fit SGLang to a plan, without those that `engine.flags` set."""
    cache = planned.cache
    flags = [f"{_BATCH_FLAG}={cache.batch}"]
    if planned.capacity is not None:
        flags.append(f"{_SHARE_FLAG}={cache.share:g}")
    flags.append(_HEAD_FLAG)
    if shape.has_vision:
        # Without it the engine also loads the vision tower, and keeps memory for images. SGLang
        # refuses its own `--language-model-only` for Qwen3.5 and Qwen3.6.
        flags.append(f'{_CONFIG_FLAG}={{"language_model_only":true}}')
    return tuple(flag for flag in flags if _flag(recipe, flag.partition("=")[0]) is None)


def token_bytes(shape: Shape, num_gpus: int) -> float:
    """Return the cache of one token on each GPU of an engine."""
    heads = max(shape.num_kv_heads / num_gpus, 1)
    return 2 * shape.num_attention_layers * heads * shape.head_dim * _BF16


def state_bytes(shape: Shape, num_gpus: int) -> float:
    """Return the linear-attention state of one sequence on each GPU of an engine."""
    if not shape.num_linear_layers:
        return 0.0
    keys, values = shape.linear_key_size, shape.linear_value_size
    recurrent = values * keys / shape.linear_num_key_heads * _FP32
    convolution = (shape.linear_conv_size - 1) * (2 * keys + values) * _BF16
    return shape.num_linear_layers * (recurrent + convolution) / num_gpus


def _flag(recipe: Recipe, name: str) -> str | None:
    """Return the value of a flag in `engine.flags`, "" if it has none; None without the flag."""
    words = " ".join(map(str, recipe.engine.options.get("flags", ()))).replace("=", " ").split()
    if name not in words:
        return None
    return next(iter(words[words.index(name) + 1 :]), "")


def _fraction(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise RecipeError(
            f"engine.flags has {_SHARE_FLAG} {value!r}, which is not a fraction of a GPU",
            hint="give a number between 0 and 1, such as 0.8",
        )
    return share


def check_memory(recipe: Recipe, planned: MemoryPlan) -> None:
    """Raise RecipeError if a plan does not fit; the hint names the keys that save memory."""
    if planned.fits:
        return
    phase = planned.fullest
    over = planned.capacity is not None and phase.total > planned.capacity
    if over:
        largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
        message = (
            f"{phase.name} needs {phase.total:.1f} of the {planned.capacity:.1f} GiB of an "
            f"{recipe.cluster.gpu.upper()}: {parts}, …"
        )
    else:
        message = (
            f"an engine's cache holds {planned.cache.tokens:,} tokens, less than one context of "
            f"{recipe.rollout.max_context_tokens:,}"
        )
    in_engine = not over or phase.name != "train"
    hint = _ENGINE_HINT if in_engine else _TRAINER_HINT
    raise RecipeError(message, hint=hint)
