"""Search a recipe's keys for the plan that makes the most Episodes an hour.

For each way to share the GPUs, the fastest trainer that fits is computed. The other keys are
climbed: from two starts, one key at a time moves to its next value while that is better. Each plan
passes the checks of a dry run and is simulated, and their number is bounded, so a search repeats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import ceil, inf
from random import Random
from typing import Any

from swerl.core.errors import RecipeError, unknown
from swerl.plan.cost import estimate, from_recipe, override
from swerl.plan.layout import LAYOUT_KEYS, candidates, check_layout, layout
from swerl.plan.memory import GPUS, kv_cache, plan_memory
from swerl.plan.plan import needs_reference, plan
from swerl.plan.shape import Shape, shape_of
from swerl.plan.simulation.episodes import LoadSource
from swerl.plan.simulation.machine import machine
from swerl.plan.simulation.schedule import SimulatedRun
from swerl.plan.simulation.simulate import assumptions, load_source, simulate, values
from swerl.recipe.schema import Recipe

Changes = dict[str, Any]
"""Values by recipe key, such as `trainer.ranks`."""

_MOST = 512
"""Largest batch to try, in Episodes."""
_TURNS = 1_200_000
"""Simulated turns of one search."""
_WORTH = 1.05
"""Gain from which a shorter budget is worth a line."""
_BETTER = 1.005
"""A smaller gain is none."""
_TIMES = (0.5, 1.0, 2.0, 4.0)
"""Batch and concurrency to try, relative to the recipe's."""
_RENTED = ("e2b",)
"""Sandboxes of which more can be had; the others share machines."""
_STOPPED = 0.01
"""Share of Episodes that the agent's budget may stop: they are those of the hard Tasks."""


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """One simulated plan."""

    changes: Mapping[str, Any]
    """Keys that differ from the recipe."""
    recipe: Recipe
    run: SimulatedRun

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; the first one starts from nothing and is left out."""
        later = [step.seconds for step in self.run.steps[1:]] or [self.run.step_s]
        return sum(later) / len(later)

    @property
    def episodes_per_hour(self) -> float:
        """Trained Episodes an hour."""
        return 3600 * batch_size(self.recipe) / self.step_s

    @property
    def dollars_per_step(self) -> float:
        """Dollars of a step, GPUs and sandboxes. Raises InputError if a price is unknown."""
        minutes, seconds = self.step_s / 60, self.run.sandbox_s
        given = (f"step_minutes={minutes}", f"sandbox_seconds={seconds}", "eval_episodes=0")
        middle = estimate(from_recipe(self.recipe), given).cases[1]
        return middle.total_dollars / self.recipe.steps


def batch_size(recipe: Recipe) -> int:
    """Return the trained Episodes of a step."""
    return recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key. Raises RecipeError if there is none."""
    value: Any = recipe
    for name in key.split("."):
        if not hasattr(value, name):
            raise RecipeError(f"no recipe key {key!r}", hint="for example trainer.ranks")
        value = getattr(value, name)
    return value


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values of some keys of sections."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    made = {name: getattr(recipe, name).model_copy(update=each) for name, each in sections.items()}
    return recipe.model_copy(update=made)


@dataclass(slots=True)
class PlanSearch:
    """Searches the plans of one recipe on the GPUs of its cluster."""

    recipe: Recipe
    keep: Collection[str] = ()
    """Keys that stay as the recipe sets them."""
    most_sandboxes: int | None = None
    source: LoadSource | None = None
    """Episodes of a real run; None draws them."""
    settings: tuple[str, ...] = ()
    """Overrides of assumptions."""
    resumed: bool = False
    """Search only keys that a run may change when it resumes."""
    num_steps: int = 9
    """Simulated steps of one plan: stale Groups delay the fifth and later ones."""
    plans: dict[str, TunedPlan | None] = field(default_factory=dict)
    """Simulated plans by their changes; None if one does not fit."""
    _shape: Shape = field(init=False)
    _value: Mapping[str, float] = field(init=False)
    axes: list[list[Changes]] = field(init=False)
    """Values of keys to search, apart from the trainer's layout."""
    _rows: list[int] = field(init=False)
    """Rows of a step, which rank the trainers."""
    _trainers: dict[tuple[bool, int, int], Changes | None] = field(default_factory=dict)
    """Keys of the fastest trainer by share of the GPUs and size of engines on the same ones."""
    _turns: int = 0
    _nearest: tuple[float, str] = (inf, "has a layout that is not legal")
    """GiB over a GPU's memory of the plan that comes closest, and the reason."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        if recipe.cluster.gpus_per_node and recipe.cluster.gpu not in GPUS:
            raise unknown("GPU type", recipe.cluster.gpu, GPUS)
        self._shape = shape_of(recipe.model)
        self._value = values(override(assumptions(recipe), self.settings))
        self.axes = list(self._all_axes())
        for key in self.keep:
            kept = value_of(recipe, key)
            axes = ([e for e in axis if e.get(key, kept) == kept] for axis in self.axes)
            self.axes = [axis or [{}] for axis in axes]
        source, chance = self.source or load_source(recipe, self._value), Random(recipe.seed)
        drawn = (source.draw(chance) for _ in range(batch_size(recipe)))
        self._rows = [row for load in drawn for row in load.rows()]

    @property
    def own(self) -> TunedPlan | None:
        """The recipe's own plan; None if it does not fit."""
        return self.plans.get(repr([]))

    @property
    def found(self) -> list[TunedPlan]:
        """The plans so far, the best first."""
        most = max(_STOPPED, self.own.run.timed_out if self.own else 0.0)
        fair = [each for each in self.plans.values() if each and each.run.timed_out <= most]
        return sorted(fair, key=lambda each: (-each.episodes_per_hour, len(each.changes)))

    def best(self, number: int = 3) -> list[TunedPlan]:
        """Return the best plans. Raises RecipeError if none fits."""
        self.simulate({})
        for start in self._starts():
            self._climb(start)
        if not self.found:
            raise RecipeError(
                f"no plan of {self.recipe.name} fits: the nearest {self._nearest[1]}",
                hint="give more or larger GPUs, or shorten rollout.max_context_tokens",
            )
        return self.found[:number]

    def shorter(self, best: TunedPlan) -> TunedPlan | None:
        """Return a plan with half of the agent's seconds, if that is faster; `best` never has it.

        It stops other Episodes, so it changes what is learned.
        """
        half = {"budgets.agent_s": self.recipe.budgets.agent_s / 2}
        made = self.simulate({**best.changes, **half})
        return made if made and made.step_s * _WORTH < best.step_s else None

    def simulate(self, changes: Changes) -> TunedPlan | None:
        """Plan and simulate a recipe with these changes; None if it does not fit."""
        changes = {k: v for k, v in changes.items() if v != value_of(self.recipe, k)}
        name = repr(sorted(changes.items()))
        if name not in self.plans:
            self.plans[name] = None
            recipe = changed(self.recipe, changes)
            try:
                planned = plan(recipe)
            except RecipeError as error:
                self._nearest = min(self._nearest, (1e9, f"is refused: {error}"))
                return None
            run = simulate(
                *(recipe, self._shape, planned.layout),
                planned.memory.cache if planned.memory else None,
                settings=self.settings,
                recorded=self.source,
                num_steps=self.num_steps,
            ).own
            self._turns += len(run.turn_times)
            self.plans[name] = TunedPlan(changes, recipe, run)
        return self.plans[name]

    def _all_axes(self) -> Iterator[list[Changes]]:
        """Yield the share of the GPUs, the schedule, engines, the batch, and concurrency."""
        rollout, cluster = self.recipe.rollout, self.recipe.cluster
        if not self.resumed:
            num_gpus = cluster.nodes * cluster.gpus_per_node
            pools = (1.5, 2.0, 3.0, 4.0)
            schedules: list[Changes] = [{"schedule.mode": "one-step-off"}]
            schedules += ({"schedule.mode": "async", "schedule.pool": p} for p in pools)
            unit = cluster.gpus_per_node if cluster.nodes > 1 else 1
            apart = {ceil(num_gpus * n / 8 / unit) * unit for n in range(1, 8)} - {num_gpus}
            together = {"cluster.colocate": True, "schedule.mode": "sync"}
            together["schedule.pool"] = self.recipe.schedule.pool
            if num_gpus:
                yield [
                    {**together, "trainer.ranks": num_gpus},
                    *({"cluster.colocate": False, "trainer.ranks": each} for each in sorted(apart)),
                ]
                yield schedules
                yield [{"cluster.gpus_per_engine": each} for each in (1, 2, 4, 8)]
            else:  # The engine is beside the trainer, on the same cores.
                yield [{}]
                yield [{"schedule.mode": "sync"}, *schedules]
                yield [{}]
            own = rollout.groups_per_step
            most = max(_MOST // rollout.episodes_per_group, own)
            groups = {max(1, min(round(own * each), most)) for each in _TIMES}
            yield [{"rollout.groups_per_step": each} for each in sorted(groups)]
        times = max(_TIMES) if self.recipe.sandbox.type in _RENTED else 1
        most = self.most_sandboxes or int(times * rollout.concurrency)
        slots = {max(1, round(rollout.concurrency * each)) for each in _TIMES} | {most}
        yield [{"rollout.concurrency": each} for each in sorted(slots) if each <= most]

    def _starts(self) -> Iterator[list[int]]:
        """Yield places of plans that fit: GPUs of their own, and in turns; with all sandboxes."""
        middle, last = [(len(axis) - 1) // 2 for axis in self.axes[:-1]], len(self.axes[-1]) - 1
        if not middle:
            yield [last]
            return
        share, schedule, engine, groups = middle
        for shares in (sorted(range(1, len(self.axes[0])), key=lambda n: abs(n - share)), [0]):
            engines = sorted(range(len(self.axes[2])), key=lambda n: abs(n - engine))
            places = ([s, schedule, e, groups, last] for s in shares for e in engines)
            yield from islice(filter(self.at, places), 1)

    def at(self, place: Sequence[int]) -> float:
        """Return Episodes an hour of a place on the axes; 0 if its plan does not fit."""
        outer: Changes = {}
        for axis, number in zip(self.axes, place, strict=True):
            outer = {**axis[number], **outer}
        trainer = self._trainer(changed(self.recipe, outer))
        made = None if trainer is None else self.simulate(outer | trainer)
        return made.episodes_per_hour if made else 0.0

    def _climb(self, place: list[int]) -> None:
        """Move one key after the other while the plan becomes better.

        Fewer sandboxes that do as well are better, too.
        """
        best, before = self.at(place), 0.0
        while best > before * _BETTER and self._turns < _TURNS:
            before = best
            for axis, move in product(range(len(place)), (-1, 1)):
                needed = 1 / _BETTER if axis == len(place) - 1 and move < 0 else _BETTER
                while self._turns < _TURNS and 0 <= place[axis] + move < len(self.axes[axis]):
                    near = [*place[:axis], place[axis] + move, *place[axis + 1 :]]
                    if (rate := self.at(near)) < best * needed or not rate:
                        break
                    place, best = near, rate

    def _trainer(self, recipe: Recipe) -> Changes | None:
        """Return the fastest trainer that fits its share of the GPUs; None if there is none."""
        cluster = recipe.cluster
        if not cluster.colocate:
            recipe = changed(recipe, {"cluster.gpus_per_engine": 1})  # Its size may not divide.
        share = (cluster.colocate, recipe.trainer.ranks, recipe.cluster.gpus_per_engine)
        if share not in self._trainers:
            rated = ((self._step_s(changed(recipe, each)), each) for each in self._fitting(recipe))
            self._trainers[share] = min(rated, key=lambda each: each[0], default=(inf, None))[1]
        return self._trainers[share]

    def _step_s(self, recipe: Recipe) -> float:
        """Return the seconds of a step's training and of the switch to it."""
        found = layout(recipe, self._shape)
        gpu = GPUS.get(recipe.cluster.gpu) if found.num_gpus else None
        cache = kv_cache(recipe, self._shape, found, gpu_gib=gpu.memory_gib) if gpu else None
        made = machine(recipe, self._shape, found, cache, self._value)
        return made.train_s(self._rows) + made.switch_s

    def _fitting(self, recipe: Recipe) -> Iterator[Changes]:
        """Yield trainers that fit a GPU, with micro-batches of one, two and four full contexts."""
        own = {key: getattr(recipe.trainer, key) for key in LAYOUT_KEYS}
        if not recipe.cluster.gpus_per_node:
            yield {}
            return
        reference = needs_reference(recipe) and not recipe.trainer.lora.rank
        for sizes in [own] if self.resumed else candidates(recipe, self._shape):
            context, expert = sizes["context_parallel"], sizes["expert_parallel"]
            usual = sizes["expert_tensor_parallel"] in (1, sizes["tensor_parallel"])
            if sizes != own and not (usual and context.bit_count() == expert.bit_count() == 1):
                continue
            for times, recompute, offload in product((1, 2, 4), (False, True), (False, True)):
                tokens = times * -(-recipe.rollout.max_context_tokens // context)
                made = {**sizes, "tokens_per_micro_batch": tokens, "recompute": recompute}
                made["offload_optimizer"] = offload
                changes = {f"trainer.{key}": value for key, value in made.items()}
                kept = {key: value_of(recipe, key) for key in self.keep if key in changes}
                if changes == changes | kept and self._fits(changed(recipe, changes), reference):
                    yield changes

    def _fits(self, recipe: Recipe, reference: bool) -> bool:
        """Return whether a trainer is legal and fits; remember the one that comes closest."""
        try:
            check_layout(recipe, self._shape)
        except RecipeError:
            return False
        found, gib = layout(recipe, self._shape), GPUS[recipe.cluster.gpu].memory_gib
        planned = plan_memory(recipe, self._shape, found, reference=reference)
        fullest = max(planned.phases[1:], key=lambda phase: phase.total)
        sizes = ", ".join(f"{key} = {getattr(recipe.trainer, key)}" for key in LAYOUT_KEYS)
        need = f"needs {fullest.total:.1f} of {gib:.1f} GiB in {fullest.name}: {sizes}"
        if fullest.total > gib:
            self._nearest = min(self._nearest, (fullest.total - gib, need))
        return fullest.total <= gib
