"""The training loop: roll out, grade, learn, publish, commit; then the next step.

A step is committed when `state.json` moves. What was finished before a crash is read back, so
the same command goes on where the last one stopped. `schedule.mode` decides whether rollouts and
optimizer steps take turns or run side by side; the loop is the same (`rollout/schedules.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from swerl.core.contracts import Algorithm, Engine, Trainer
from swerl.core.events import Emit, Notice, StepEnded
from swerl.core.task import Task
from swerl.recipe.schema import Recipe
from swerl.rollout import record
from swerl.rollout.draining import DrainingEngine
from swerl.rollout.parts import Parts
from swerl.rollout.schedules import Schedule, ScheduleInputs, open_schedule
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs import history, prompts, tables
from swerl.runs.layout import Cursor, RunFolder, State
from swerl.runs.prompts import LengthBias
from swerl.training import batch as batches
from swerl.training import step_metrics as outcome
from swerl.training import updates as mini_batches
from swerl.training.batch import Collected, collect
from swerl.training.evaluation import evaluate, is_due
from swerl.training.step_metrics import Meter
from swerl.training.updates import Learned, Skipping
from swerl.training.weight_sync import sync as weight_sync


@dataclass(frozen=True, slots=True)
class Machine:
    """The wired parts of one run."""

    recipe: Recipe
    folder: RunFolder
    train: Sequence[Task]
    evals: Mapping[str, Sequence[Task]]
    """Split name -> Tasks that are never trained on."""
    engine: Engine
    trainer: Trainer
    algorithm: Algorithm
    parts: Parts
    meter: Meter
    draining: DrainingEngine | None = None
    """Set if `schedule.replies` requires that replies end before weights change."""
    stopping: Callable[[], bool] = lambda: False
    """Asked after each committed step: whether the run is to end there."""


async def run(machine: Machine) -> history.History:
    """Train to the recipe's last step, from wherever the run folder stands."""
    folder, recipe = machine.folder, machine.recipe
    books = await _resume(machine)
    state = folder.read_state()
    async with (
        Commits(machine.trainer, folder, machine.parts.emit) as commits,
        open_schedule(_schedule_inputs(machine, books.versions), state.cursor) as schedule,
    ):
        for step in range(state.step, recipe.steps):
            if is_due(step, recipe.eval):
                await commits.finish()  # what is evaluated must not be lost
                await _evaluate(machine, schedule, step)
            machine.meter.start()
            groups = await schedule.take(step)
            collected = collect(step, groups.kept, machine.algorithm)
            collected = _stored(folder, step, groups, collected)
            with machine.meter.span("train"):
                learned = await _learn(machine, books, collected)
            metrics = books.close(step, groups, collected, learned)
            metrics |= machine.draining.metrics() if machine.draining else {}
            with machine.meter.span("publish"):
                await schedule.serve(lambda: _transfer(machine))
            stops = machine.stopping() and step + 1 < recipe.steps
            with machine.meter.span("save"):
                if stops or _is_saved(step + 1, recipe):
                    await commits.begin(books.state(step + 1, schedule.cursor()))
            machine.parts.emit(StepEnded(step, metrics | await machine.meter.stop()))
            if stops:
                break
        else:
            await commits.finish()
            await _evaluate(machine, schedule, recipe.steps)
    if folder.read_state().step == recipe.steps:
        folder.write_state(replace(folder.read_state(), finished=True))
    return history.read(folder.events)


@dataclass(slots=True)
class _Books:
    """What a run keeps count of from step to step."""

    folder: RunFolder
    versions: Versions
    skipping: Skipping
    length_bias: LengthBias

    def close(
        self, step: int, groups: StepGroups, collected: Collected, learned: Learned
    ) -> dict[str, float]:
        """Write a step into the prompt ledger and return its metrics."""
        entries = outcome.entries(step, groups, learned.skipped)
        prompts.append(self.folder.prompts, entries)
        self.length_bias.add(entries)
        return {
            **outcome.metrics(groups, collected, learned.stats, versions=self.versions),
            "steps_skipped": self.skipping.total,
            **self.length_bias.metrics(),
        }

    def state(self, step: int, cursor: Cursor) -> State:
        """Return what commits the first `step` steps."""
        return State(
            step=step,
            versions=self.versions.names,
            cursor=cursor,
            skipped=self.skipping.total,
            skipped_in_a_row=self.skipping.in_a_row,
        )


async def _resume(machine: Machine) -> _Books:
    """Bring trainer and engine to the committed step."""
    state, emit = machine.folder.read_state(), machine.parts.emit
    if state.step:
        emit(Notice(f"going on after step {state.step} of {machine.recipe.steps}"))
        await machine.trainer.restore(state.step)
    versions = Versions(state.versions)
    versions.add(await _transfer(machine, is_first=True))
    skipping = Skipping(
        machine.recipe.trainer.max_skipped_steps,
        total=state.skipped,
        in_a_row=state.skipped_in_a_row,
    )
    if machine.recipe.schedule.mode == "async":
        num_groups = machine.recipe.rollout.groups_per_step
        record.move_orphans_aside(machine.folder, versions, state.cursor, num_groups, emit)
    past = prompts.cut(machine.folder.prompts, steps=state.step)
    return _Books(machine.folder, versions, skipping, LengthBias(past))


def _schedule_inputs(machine: Machine, versions: Versions) -> ScheduleInputs:
    return ScheduleInputs(
        tasks=machine.train,
        parts=machine.parts,
        folder=machine.folder,
        section=machine.recipe.schedule,
        steps=machine.recipe.steps,
        versions=versions,
        draining=machine.draining,
    )


async def _transfer(machine: Machine, *, is_first: bool = False) -> str:
    """Bring the trainer's weights to the engine; return the version that serves."""
    parts = machine.trainer, machine.engine, machine.recipe.cluster, machine.parts.emit
    return await weight_sync.sync(*parts, is_first=is_first)


async def _learn(machine: Machine, books: _Books, collected: Collected) -> Learned:
    """Take the optimizer steps on a Batch, passing over those that are not finite."""
    trainer, skipping = machine.trainer, books.skipping
    path = machine.folder.samples(collected.batch.step)
    await weight_sync.make_room(machine.engine, machine.recipe.cluster)
    parts = mini_batches.split(collected.batch, machine.recipe.trainer.updates_per_batch)
    taken = [await skipping.step(trainer, part, path, machine.parts.emit) for part in parts]
    return mini_batches.learned(parts, taken)


async def _evaluate(machine: Machine, schedule: Schedule, step: int) -> None:
    await evaluate(
        machine.evals,
        step,
        machine.parts,
        machine.folder,
        section=machine.recipe.eval,
        schedule=schedule,
    )


def _stored(folder: RunFolder, step: int, groups: StepGroups, collected: Collected) -> Collected:
    """Write a step's Turns and its Batch, whose file the trainer reads too."""
    episodes = [episode for group in groups.all for episode in group.episodes]
    tables.write_turns(folder.turns(step), episodes)
    return replace(collected, batch=batches.write(folder.samples(step), collected.batch))


def _is_saved(step: int, recipe: Recipe) -> bool:
    """Return whether a step gets a checkpoint: every n-th, evaluated ones and the last."""
    return (
        step % recipe.trainer.save_every == 0 or is_due(step, recipe.eval) or step == recipe.steps
    )


class Commits:
    """Begins checkpoints and commits their steps; leaving the context waits for the last one."""

    def __init__(self, trainer: Trainer, folder: RunFolder, emit: Emit) -> None:
        self._trainer = trainer
        self._folder = folder
        self._emit = emit
        self._under_way: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Commits:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error and self._under_way:
            self._under_way.cancel()
            await asyncio.wait({self._under_way})
        else:
            await self.finish()

    async def begin(self, state: State) -> None:
        """Begin the checkpoint of `state.step`, after the one before it; `state` is its commit.

        Raises TrainerError where the one before could not be written.
        """
        await self.finish()
        best = self._folder.read_state().best
        await self._trainer.save(state.step, kept=() if best is None else (best.step,))
        self._under_way = asyncio.create_task(self._commit(state))

    async def finish(self) -> None:
        """Wait until the checkpoint under way is whole and its step committed."""
        if self._under_way:
            await self._under_way
            self._under_way = None

    async def _commit(self, state: State) -> None:
        saved = await self._trainer.saved()
        if saved and saved.warning:
            self._emit(Notice(saved.warning))
        # Evaluations commit themselves, and one may have taken place since.
        held = self._folder.read_state()
        self._folder.write_state(replace(state, evals_done=held.evals_done, best=held.best))
