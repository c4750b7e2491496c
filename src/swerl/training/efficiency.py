"""Add cost and efficiency to each step's metrics: dollars, tokens a second, MFU, memory.

Dollars are estimates from the price book. They count GPUs from the start of the command on, also
while nothing is trained, and the sandboxes of finished phases. The run folder keeps the spending of
earlier starts, up to a few seconds before a crash. The cap ends a run within a step, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from swerl.core.errors import RecipeError, RunError, RunStoppedError
from swerl.core.events import Emit, Event, Notice, PhaseEnded, StepEnded
from swerl.core.files import read_json, write_json
from swerl.plan.cost import price_book, sandbox_dollars_per_second, used_prices
from swerl.plan.memory import GPUS
from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_of
from swerl.recipe.schema import Recipe
from swerl.runs.history import RunHistory

MEASURED = "peak_memory_gib"
"""The trainer's metric: peak memory of the tensors on its fullest rank."""
PLANNED = "planned_memory_gib"
_HELD = {"boot", "agent", "diff", "grade_boot", "grade"}
"""Phases of an Episode in which a sandbox is open; the other phases are parts of these."""
_NO_TENSORS = ("contexts", "gaps")
"""Parts of the memory plan that are no tensors: CUDA contexts, NCCL buffers, allocator gaps."""
_WATCH_S = 5.0
"""Seconds between two looks at the spending; 64 GPUs cost a few cents meanwhile."""
_TOLERANCE = 0.1
"""Relative error of the memory plan above which the run warns."""


class CostMeter:
    """Forward every event; add metrics to the end of each step."""

    def __init__(
        self,
        recipe: Recipe,
        emit: Emit,
        past: RunHistory,
        *,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`past` is the history in the run folder, and `file` keeps the spending between steps.

        With `cost.max_dollars`, raises RecipeError if a price is unknown, and RunError if the
        amount is spent already.
        """
        self._recipe = recipe
        self._emit = emit
        self._clock = clock
        self._started = clock()
        self._sandbox_s = 0.0
        self._step_sandbox_s = 0.0
        self._file = file
        self._before = max([*past.series("dollars"), _stored(file)], default=0.0)
        self._rates = _rates(recipe)
        self._peak = _peak(recipe)
        self._cost = row_cost(shape_of(recipe.model), recipe.trainer.lora) if self._peak else None
        self._planned_gib = _planned_gib(recipe)
        self._warned: set[str] = set()
        self._ends_after_step = False
        self._check_cap()

    def __call__(self, event: Event) -> None:
        if isinstance(event, PhaseEnded) and event.phase in _HELD:
            self._sandbox_s += event.seconds
            self._step_sandbox_s += event.seconds
        if isinstance(event, StepEnded):
            event = replace(event, metrics={**event.metrics, **self._metrics(event.metrics)})
        self._emit(event)

    def ends_run(self) -> bool:
        """Return after a step whether the cap ends the run; its checkpoint is then not cut off."""
        self._ends_after_step = self.is_spent()
        return self._ends_after_step

    def is_spent(self) -> bool:
        """Return whether `cost.max_dollars` is reached; the first time, emit a Notice."""
        dollars, cap = self.dollars(), self._recipe.cost.max_dollars
        if cap is None or dollars is None or dollars < cap:
            return False
        if "cost" not in self._warned:
            self._warned.add("cost")
            self._emit(Notice(f"${dollars:,.2f} are spent of cost.max_dollars = {cap:g}"))
        return True

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Store the spending during the block. Raises RunStoppedError when the cap is reached."""
        block = asyncio.current_task()
        assert block is not None
        is_over = False

        async def watch() -> None:
            nonlocal is_over
            while True:
                self._store()
                if is_over := self.is_spent() and not self._ends_after_step:
                    block.cancel()
                    return
                await asyncio.sleep(_WATCH_S)

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not is_over:
                raise
            block.uncancel()
            cap = f"cost.max_dollars = {self._recipe.cost.max_dollars:g}"
            hint = "raise it to continue: --set cost.max_dollars=DOLLARS"
            raise RunStoppedError(f"{cap} is spent; {hint}", hint=hint) from None
        finally:
            watching.cancel()
            self._store()

    def _store(self) -> None:
        # The events have the spending, too; a full disk must not end the run here.
        if self._file and (dollars := self.dollars()) is not None:
            with suppress(RunError):
                write_json(self._file, {"dollars": dollars})

    def dollars(self) -> float | None:
        """Return the dollars spent so far, or None if a price is unknown."""
        if self._rates is None:
            return None
        gpus, sandbox = self._rates
        seconds = self._clock() - self._started
        return self._before + gpus * seconds + sandbox * self._sandbox_s

    def _metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        values = {"sandbox_s": self._step_sandbox_s}
        self._step_sandbox_s = 0.0
        if (dollars := self.dollars()) is not None:
            values["dollars"] = dollars
        rollout_s = metrics.get("step_s", 0.0) - sum(
            metrics.get(f"{part}_s", 0.0) for part in ("train", "publish", "save")
        )
        if rollout_s > 0 and "sampled_tokens" in metrics and not self._recipe.sft.sources:
            values["sampled_tokens_per_s"] = metrics["sampled_tokens"] / rollout_s
        if self._cost and metrics.get("train_s") and "executed_tokens" in metrics:
            work = self._cost.per_token * metrics["executed_tokens"]
            work += self._cost.per_token_pair * metrics["executed_token_pairs"]
            values["mfu"] = work / (metrics["train_s"] * self._peak)
        measured = metrics.get(MEASURED)
        if self._planned_gib is not None and measured is not None:
            values[PLANNED] = self._planned_gib
            self._check_memory(self._planned_gib, measured)
        return values

    def _check_memory(self, planned_gib: float, measured_gib: float) -> None:
        error = measured_gib / planned_gib - 1
        if abs(error) > _TOLERANCE and "memory" not in self._warned:
            self._warned.add("memory")
            compared = compare_memory(planned_gib, measured_gib)
            self._emit(Notice(f"memory: {compared}; the plan is off"))

    def _check_cap(self) -> None:
        cap = self._recipe.cost.max_dollars
        if cap is None:
            return
        if self._rates is None:
            book = price_book(self._recipe.cost.prices)
            missing = [name for name in used_prices(self._recipe) if name not in book]
            raise RecipeError(
                f"cost.max_dollars is set, but no price is set for {missing[0]}",
                hint=f"--set cost.prices.{missing[0]}=DOLLARS",
            )
        if self._before >= cap:
            message = f"this run has spent ${self._before:,.2f} of cost.max_dollars = {cap:g}"
            hint = "raise it to continue: swerl train RECIPE --set cost.max_dollars=DOLLARS"
            raise RunError(message, hint=hint)


def _stored(file: Path | None) -> float:
    """Return the spending that an earlier start stored; 0 without a readable file."""
    with suppress(RunError, KeyError, TypeError, ValueError):
        return float(read_json(file)["dollars"]) if file and file.exists() else 0.0
    return 0.0


def _rates(recipe: Recipe) -> tuple[float, float] | None:
    """Return dollars a second of all GPUs, and of one sandbox; None if a price is unknown."""
    book, cluster, limits = price_book(recipe.cost.prices), recipe.cluster, recipe.limits
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
    """Return the trainer GPUs' operations a second by their data sheet; 0 on CPU."""
    gpu = GPUS.get(recipe.cluster.gpu)
    if gpu is None or not recipe.cluster.gpus_per_node:
        return 0.0
    return recipe.trainer.ranks * gpu.bf16_flops


def _planned_gib(recipe: Recipe) -> float | None:
    """Return the planned memory of the tensors in training; None on CPU, which has no plan."""
    from swerl.plan.plan import plan

    if not recipe.cluster.gpus_per_node:
        return None
    memory = plan(recipe).memory
    assert memory is not None
    train = memory.train
    return train.total - sum(train.parts[name] for name in _NO_TENSORS)


def compare_memory(planned_gib: float, measured_gib: float) -> str:
    """Return both sizes and their relative difference, in one line."""
    error = measured_gib / planned_gib - 1
    return f"planned {planned_gib:.1f}, measured {measured_gib:.1f} GiB ({error:+.0%})"
