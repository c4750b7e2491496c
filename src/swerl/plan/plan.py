"""Plan a recipe: check it and compute its needs without starting anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from math import ceil
from pathlib import Path

from swerl.core import plugins
from swerl.core.errors import (
    EXTRAS,
    AbsentError,
    InputError,
    RecipeError,
    missing_package,
    unknown,
)
from swerl.plan.cost import Assumption, Estimate, estimate, from_recipe, group_factor, used_prices
from swerl.plan.layout import Layout, crossing, layout
from swerl.plan.memory import GPUS, MemoryPlan, check_memory, engine_flags, plan_memory
from swerl.plan.parameters import model_params, trained_params
from swerl.plan.shape import Shape, shape_of
from swerl.plan.simulation import Simulation, simulate
from swerl.plan.suggestions import Suggestion, suggestions
from swerl.recipe.check import TWIN, check_settings, obstacles, plugin_options
from swerl.recipe.schema import Recipe
from swerl.tasks.admission import admitted

_CHECKPOINT = 12
"""Checkpoint bytes per parameter: fp32 master copy and Adam's two moments."""
_NEWEST = 2
"""Checkpoints kept for crash recovery; as many published weights are kept."""
_TOKEN = 60
"""Bytes per token in Parquet, trajectory and logs, uncompressed. Assumed."""
_EXPERT = 1
"""Bytes of one recorded expert if a layer has up to 256; stored once."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes on the disk that all nodes share."""

    checkpoint: int
    """One checkpoint."""
    checkpoints: int
    """Checkpoints checkpoints at the end: the newest and the best evaluated one."""
    weights: int
    """One published version, in Hugging Face format."""
    episodes: int
    """Episodes, Turns and Samples of one step, if every context is full."""
    steps: int

    @property
    def most(self) -> int:
        """Maximum, while one more checkpoint and one more version are written."""
        written = (self.checkpoints + 1) * self.checkpoint + (_NEWEST + 1) * self.weights
        return written + self.steps * self.episodes


def plan_disk(recipe: Recipe, shape: Shape) -> DiskPlan:
    params, trainer = model_params(shape).total, recipe.trainer
    evaluated = bool(recipe.eval.every)
    return DiskPlan(
        checkpoint=trained_params(shape, trainer.lora) * _CHECKPOINT,
        checkpoints=_NEWEST + evaluated,
        weights=params * (2 if trainer.dtype == "bf16" else 4),
        episodes=_episode_bytes(recipe, shape),
        steps=recipe.steps,
    )


def _episode_bytes(recipe: Recipe, shape: Shape) -> int:
    rollout = recipe.rollout
    tokens = rollout.groups_per_step * rollout.episodes_per_group * rollout.max_context_tokens
    experts = shape.num_layers * shape.experts_per_token * recipe.trainer.routing_replay
    return tokens * (_TOKEN + experts * _EXPERT)


def kernel_modules(recipe: Recipe, shape: Shape) -> tuple[str, ...]:
    """Return the modules that every machine of a run must have for fast GPU kernels."""
    return EXTRAS["gpu"] if recipe.cluster.gpus_per_node and shape.num_linear_layers else ()


@dataclass(frozen=True, slots=True)
class RecipePlan:
    recipe: Recipe
    shape: Shape
    layout: Layout
    memory: MemoryPlan | None
    """None on CPU."""
    disk: DiskPlan
    cost: Estimate | None
    """None if the price book lacks a price."""
    notes: tuple[str, ...]
    """Remarks to consider before spending money."""
    obstacles: tuple[InputError, ...]
    """Faults: names that nothing has, tasks without a certificate, packages that are missing."""
    absent: tuple[AbsentError, ...]
    """Files, folders and programs to provide on this machine before the launch."""

    def simulate(self, rows: Iterable[Assumption] = ()) -> Simulation | None:
        """Simulate some steps; None on CPU, on GPUs of unknown speed, and of recorded Episodes.

        `rows` replace the simulation's assumptions."""
        if self.memory is None or self.memory.capacity is None or self.recipe.sft.sources:
            return None
        return simulate(self.recipe, self.shape, self.layout, self.memory.cache, rows=rows)

    def suggestions(self, simulated: Simulation) -> list[Suggestion]:
        """Return changes of the recipe that fit and make its simulated run faster."""
        return suggestions(self.recipe, self.shape, simulated)

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """Flags that fit SGLang servers to this plan; none on CPU."""
        return engine_flags(self.recipe, self.shape, self.memory) if self.memory else ()

    @property
    def episodes_per_step(self) -> int:
        """Trained Episodes of a step; recorded ones if the recipe names sources."""
        if self.recipe.sft.sources:
            return self.recipe.sft.episodes_per_step
        return self.recipe.rollout.groups_per_step * self.recipe.rollout.episodes_per_group

    @property
    def episodes_begun(self) -> float:
        """Mean number of Episodes that a step starts, including those that a filter rejects."""
        return self.episodes_per_step * group_factor(self.recipe.rollout)

    @property
    def num_episodes(self) -> int:
        """Trained Episodes of the whole run."""
        return self.recipe.steps * self.episodes_per_step

    @property
    def sandboxes_at_once(self) -> int:
        """Maximum number of concurrent sandboxes: an Episode holds one at a time."""
        rollout = self.recipe.rollout
        begun = self.episodes_per_step
        if self.recipe.schedule.mode == "async":
            begun = ceil(self.recipe.schedule.pool * self.episodes_per_step)
        return min(rollout.concurrency, begun)

    @property
    def tokens_per_gpu(self) -> int:
        """Positions of a full-length sequence on one rank."""
        return -(-self.recipe.rollout.max_context_tokens // self.layout.context)


def plan(recipe: Recipe) -> RecipePlan:
    """Check a recipe and compute its plan; needs no GPU and no network.

    Raises RecipeError on the first setting that is wrong on every machine. Faults of names, tasks
    and packages are listed in `obstacles`, and what this machine lacks in `absent`.
    """
    check_settings(recipe)
    shape = shape_of(recipe.model)
    if not trained_params(shape, recipe.trainer.lora):
        raise RecipeError(
            f"{shape.name} has no layer of trainer.lora.targets = "
            f"{list(recipe.trainer.lora.targets)}",
            hint="name projections that the model has, or leave the key out",
        )
    sizes = layout(recipe, shape)
    on_gpu = _memory(recipe, shape, sizes) if sizes.num_gpus else None
    faults = (*_missing_packages(recipe), *obstacles(recipe), *_unknown_gpu(recipe))
    faults = (*faults, *_too_many_ranks(recipe), *_unfit_tasks(recipe))
    return RecipePlan(
        recipe=recipe,
        shape=shape,
        layout=sizes,
        memory=on_gpu,
        disk=plan_disk(recipe, shape),
        cost=_cost(recipe),
        notes=tuple(_notes(recipe, shape, sizes, on_gpu)),
        obstacles=tuple(error for error in faults if not isinstance(error, AbsentError)),
        absent=tuple(error for error in faults if isinstance(error, AbsentError)),
    )


def _missing_packages(recipe: Recipe) -> Iterator[InputError]:
    """Yield an error for every extra whose packages the run needs and this Python lacks."""
    extras = ["twin", recipe.sandbox.type, "cluster" if recipe.cluster.launcher == "ray" else ""]
    for extra in extras:
        absent = (name for name in EXTRAS.get(extra, ()) if find_spec(name) is None)
        yield from filter(None, map(missing_package, islice(absent, 1)))


def _too_many_ranks(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error if ranks on CPU have fewer cores than one each on this machine."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none, and can plan
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    ranks, cluster = recipe.trainer.ranks, recipe.cluster
    if cluster.launcher == "local" and not cluster.gpus_per_node and ranks > cores:
        message = f"trainer.ranks = {ranks}, but this machine has {cores} cores"
        yield RecipeError(message, hint=f"set trainer.ranks = {cores} or fewer")


def _unfit_tasks(recipe: Recipe) -> Iterator[InputError]:
    """Yield an error if the recipe does not admit the Tasks of its file."""
    source = recipe.tasks.source
    if source == TWIN or recipe.sft.sources or not Path(source).is_file():
        return
    try:
        admitted(recipe)
    except InputError as error:
        yield error


def _unknown_gpu(recipe: Recipe) -> Iterator[InputError]:
    """Yield an error if the GPU type is unknown; a price of your own declares it."""
    gpu = recipe.cluster.gpu
    if not recipe.cluster.gpus_per_node or gpu in GPUS or f"{gpu}_hour" in recipe.cost.prices:
        return
    error = unknown("GPU type", gpu, GPUS)
    error.hint += f" For another GPU, set cost.prices.{gpu}_hour; its memory is not checked."
    yield error


def _memory(recipe: Recipe, shape: Shape, sizes: Layout) -> MemoryPlan:
    # Adapters that are turned off leave the reference.
    reference = needs_reference(recipe) and not recipe.trainer.lora.rank
    planned = plan_memory(recipe, shape, sizes, reference=reference)
    check_memory(recipe, planned)
    return planned


def needs_reference(recipe: Recipe) -> bool:
    """Return whether the algorithm compares the policy with the first weights."""
    try:
        options = plugin_options("algorithms", recipe.algorithm, section="algorithm")
    except RecipeError:
        raise
    except InputError:  # an obstacle: it is unknown or does not load
        return False
    arguments = () if options is None else (options,)
    return plugins.load("algorithms", recipe.algorithm.type).build(*arguments).needs_reference


def _cost(recipe: Recipe) -> Estimate | None:
    try:
        return estimate(from_recipe(recipe))
    except InputError:
        return None


def _notes(recipe: Recipe, shape: Shape, sizes: Layout, on_gpu: MemoryPlan | None) -> list[str]:
    notes = []
    episodes = recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group
    if sizes.num_gpus and recipe.rollout.concurrency < episodes:
        waves = -(-episodes // recipe.rollout.concurrency)
        notes.append(
            f"rollout.concurrency = {recipe.rollout.concurrency} runs a step's {episodes} "
            f"episodes in {waves} rounds, while every GPU is paid for"
        )
    if episodes % sizes.data:
        notes.append(f"{episodes} episodes a step spread unevenly over {sizes.data} data ranks")
    notes += _crossing_notes(recipe, sizes)
    if sizes.num_gpus and recipe.trainer.dtype == "fp32":
        notes.append("trainer.dtype = fp32 on GPUs: bf16 halves time and memory")
    for name in sorted(set(recipe.cost.prices) - set(used_prices(recipe))):
        notes.append(f"cost.prices.{name} is unused; in use: {', '.join(used_prices(recipe))}")
    if on_gpu:
        notes += _memory_notes(recipe, on_gpu)
    return notes


def _crossing_notes(recipe: Recipe, sizes: Layout) -> Iterator[str]:
    """Yield a note for each group that every layer waits for and that spans nodes."""
    crossed = crossing(sizes)
    if "expert" in crossed:
        yield f"expert_parallel = {sizes.expert} spans nodes: all-to-all leaves the node"
    if "context" not in crossed:
        return
    text = f"context_parallel = {sizes.context} x tensor_parallel = {sizes.tensor} spans nodes"
    text += ": every layer's exchange leaves the node"
    if inside := sizes.gpus_per_node // sizes.tensor:
        tokens = -(-recipe.trainer.tokens_per_micro_batch * sizes.context // inside)
        text += (
            f"; context_parallel = {inside} with tokens_per_micro_batch = {tokens} stays inside, "
            "if it fits"
        )
    yield text


def _memory_notes(recipe: Recipe, planned: MemoryPlan) -> list[str]:
    notes = []
    if planned.capacity is None:
        notes.append(f"the memory of a {recipe.cluster.gpu!r} is unknown: compare by hand")
    elif planned.train.total > 0.92 * planned.capacity:
        share = planned.train.total / planned.capacity
        notes.append(f"training fills {share:.0%} of a GPU: the plan is not exact enough for that")
    cache = planned.cache
    if cache.running is not None and cache.running < cache.sequences:
        notes.append(
            f"an engine holds linear-attention states of {cache.running} requests at once and "
            f"serves {cache.sequences} episodes: the others wait"
        )
    if cache.contexts < cache.sequences:
        notes.append(
            f"an engine's cache holds {cache.contexts:.1f} full contexts and serves "
            f"{cache.sequences} episodes: long ones are evicted and recomputed"
        )
    return notes
