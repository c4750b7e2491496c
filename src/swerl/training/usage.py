"""x"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from swerl.core.errors import RecipeError, RunError
from swerl.core.events import Emit, Event, Notice, PhaseEnded, StepEnded
from swerl.plan.cost import Price, price_book, sandbox_dollars_per_second, used_prices
from swerl.plan.memory import GPUS
from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_of
from swerl.recipe.schema import Recipe
from swerl.runs.history import History

_HELD = {"boot", "agent", "diff", "grade_boot", "grade"}
"""Phases of an Episode in which a sandbox is open; others are parts of these."""


class Accounts:
    """Hands every event on, a step's end with more metrics."""

    def __init__(
        self,
        recipe: Recipe,
        emit: Emit,
        past: History,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`past` is what the run's folder tells.

        With `cost.max_dollars`, raises RecipeError where a price is not known, and RunError where
        it is spent already.
        """
        self._recipe = recipe
        self._emit = emit
        self._clock = clock
        self._started = clock()
        self._sandbox_s = 0.0
        self._step_sandbox_s = 0.0
        self._before = max(past.series("dollars"), default=0.0)
        self._rates = _rates(recipe)
        self._peak = _peak(recipe)
        self._cost = row_cost(shape_of(recipe.model)) if self._peak else None
        self._memory = MemoryCheck.of(recipe)
        self._told = False
        self._refuse()

    def __call__(self, event: Event) -> None:
        """Take one event and hand it on."""
        if isinstance(event, PhaseEnded) and event.phase in _HELD:
            self._sandbox_s += event.seconds
            self._step_sandbox_s += event.seconds
        if isinstance(event, StepEnded):
            event = replace(event, metrics={**event.metrics, **self._figures(event.metrics)})
        self._emit(event)

    def is_spent(self) -> bool:
        """Return whether the run has spent what it may; says so once."""
        dollars, cap = self.dollars(), self._recipe.cost.max_dollars
        if cap is None or dollars is None or dollars < cap:
            return False
        if not self._told:
            self._told = True
            self._emit(Notice(f"${dollars:,.2f} are spent of cost.max_dollars = {cap:g}"))
        return True

    def dollars(self) -> float | None:
        """Return the dollars spent so far; None where a price is not known."""
        if self._rates is None:
            return None
        gpus, sandbox = self._rates
        seconds = self._clock() - self._started
        return self._before + gpus * seconds + sandbox * self._sandbox_s

    def _figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        found = {"sandbox_s": self._step_sandbox_s}
        self._step_sandbox_s = 0.0
        if (dollars := self.dollars()) is not None:
            found["dollars"] = dollars
        rollout_s = metrics.get("step_s", 0.0) - sum(
            metrics.get(f"{part}_s", 0.0) for part in ("train", "publish", "save")
        )
        if rollout_s > 0 and "sampled_tokens" in metrics:
            found["sampled_tokens_per_s"] = metrics["sampled_tokens"] / rollout_s
        if self._cost and metrics.get("train_s") and "row_tokens" in metrics:
            work = self._cost.per_token * metrics["row_tokens"]
            work += self._cost.per_token_pair * metrics["row_token_pairs"]
            found["mfu"] = work / (metrics["train_s"] * self._peak)
        return found | self._memory.figures(metrics, self._emit)

    def _refuse(self) -> None:
        cap = self._recipe.cost.max_dollars
        if cap is None:
            return
        if self._rates is None:
            missing = [
                name for name in used_prices(self._recipe) if name not in _book(self._recipe)
            ]
            raise RecipeError(
                f"cost.max_dollars is set, and nobody said what {missing[0]} is",
                hint=f"--set cost.prices.{missing[0]}=DOLLARS",
            )
        if self._before >= cap:
            message = f"this run has spent ${self._before:,.2f} of cost.max_dollars = {cap:g}"
            hint = "raise it to go on: swerl train RECIPE --set cost.max_dollars=DOLLARS"
            raise RunError(message, hint=hint)


def _book(recipe: Recipe) -> Mapping[str, Price]:
    return price_book(recipe.cost.prices)


def _rates(recipe: Recipe) -> tuple[float, float] | None:
    """Return dollars a second of all GPUs, and of one sandbox."""
    book, cluster, limits = _book(recipe), recipe.cluster, recipe.limits
    names = used_prices(recipe)
    if not all(name in book for name in names):
        return None
    vcpu, gib, *hour = (book[name].value for name in names)
    sandbox = sandbox_dollars_per_second(
        vcpus=limits.num_cpus,
        memory_gib=limits.memory_mib / 1024,
        vcpu_second=vcpu,
        gib_second=gib,
    )
    return cluster.nodes * cluster.gpus_per_node * sum(hour) / 3600, sandbox


def _peak(recipe: Recipe) -> float:
    """Return the operations a second of the trainer's GPUs by their data sheet; 0 on CPU."""
    gpu = GPUS.get(recipe.cluster.gpu)
    if gpu is None or not recipe.cluster.gpus_per_node:
        return 0.0
    return recipe.trainer.ranks * gpu.bf16_flops


MEASURED = "peak_memory_gib"
"""The trainer's metric: what the tensors of its fullest rank took at most."""
PLANNED = "planned_memory_gib"
_OUTSIDE = ("contexts", "gaps")
"""Parts of the plan that are no tensors: CUDA's contexts, NCCL's buffers, the allocator's gaps."""
_ALLOWED = 0.1
"""Share by which a plan may be wrong before the run says so."""


@dataclass(slots=True)
class MemoryCheck:
    """Compares, and warns once."""

    planned_gib: float | None
    """Of the tensors in training; None on CPU."""
    _told: bool = field(default=False)

    @classmethod
    def of(cls, recipe: Recipe) -> MemoryCheck:
        """Return the check of a recipe. Raises RecipeError where it has no plan."""
        from swerl.plan.plan import plan

        if not recipe.cluster.gpus_per_node:
            return cls(None)
        memory = plan(recipe).memory
        assert memory is not None
        train = memory.train
        return cls(train.total - sum(train.parts[name] for name in _OUTSIDE))

    def figures(self, metrics: Mapping[str, float], emit: Emit) -> dict[str, float]:
        """Return what to add to a step's metrics; nothing where nothing was measured."""
        measured = metrics.get(MEASURED)
        if self.planned_gib is None or measured is None:
            return {}
        off = measured / self.planned_gib - 1
        if abs(off) > _ALLOWED and not self._told:
            self._told = True
            emit(Notice(f"memory: {describe(self.planned_gib, measured)}; the plan is off"))
        return {PLANNED: self.planned_gib}


def describe(planned_gib: float, measured_gib: float) -> str:
    """Return both and how far they are apart, in one line."""
    off = measured_gib / planned_gib - 1
    return f"planned {planned_gib:.1f}, measured {measured_gib:.1f} GiB ({off:+.0%})"
