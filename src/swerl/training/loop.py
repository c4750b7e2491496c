"""The training loop: roll out, grade, learn, publish, commit; then the next step.

A step is committed when `state.json` names it. After a crash the same command resumes from the
last committed step and reuses finished Episodes. `schedule.mode` decides whether rollouts and
optimizer steps alternate or overlap; the loop is the same (`rollout/schedules.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from swerl.core.contracts import Algorithm, Engine, Trainer
from swerl.core.events import Emit, Notice, StepEnded
from swerl.core.task import Task
from swerl.recipe.schema import Recipe
from swerl.rollout import record
from swerl.rollout.kept import KeptEpisode, KeptSchedule
from swerl.rollout.parts import Parts
from swerl.rollout.schedules import Schedule, ScheduleInputs, open_schedule
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs import history, prompts, tables
from swerl.runs.layout import Cursor, RunFolder, RunState
from swerl.training import batch as batches
from swerl.training import step_metrics, updates
from swerl.training.batch import CollectedBatch, collect
from swerl.training.evaluation import evaluate, is_due
from swerl.training.step_metrics import StepTimer
from swerl.training.updates import SkipCounter, UpdateResult
from swerl.training.weight_sync import sync as weight_sync


@dataclass(frozen=True, slots=True)
class Training:
    recipe: Recipe
    folder: RunFolder
    train: Sequence[Task]
    evals: Mapping[str, Sequence[Task]]
    """Split name -> Tasks that are never trained on."""
    engine: Engine | None
    """None: nothing samples, so no weights are sent."""
    trainer: Trainer
    algorithm: Algorithm
    parts: Parts | None
    """The parts of Episodes; None without an engine."""
    emit: Emit
    timer: StepTimer
    sft_episodes: Sequence[KeptEpisode] = ()
    """Recorded Episodes to train on in place of new ones."""
    stopping: Callable[[], bool] = lambda: False
    """Called after each step; True ends the run once the step is committed."""


async def run(training: Training) -> history.RunHistory:
    """Train from the last committed step to the recipe's last step."""
    folder, recipe = training.folder, training.recipe
    counters = await _resume(training)
    state = folder.read_state()
    async with (
        Commits(training.trainer, folder) as commits,
        _open_schedule(training, counters.versions, state.cursor) as schedule,
    ):
        for step in range(state.step, recipe.steps):
            if is_due(step, recipe.eval):
                await commits.finish()  # a crash must not lose the weights that are evaluated
                await _evaluate(training, schedule, step)
            training.timer.start()
            groups = await schedule.take(step)
            collected = _write(folder, step, groups, _collected(training, step, groups))
            with training.timer.span("train"):
                result = await _learn(training, counters, collected)
            # `serve` may add a version; staleness refers to the weights that this step trains.
            metrics = counters.record(step, groups, collected, result)
            with training.timer.span("publish"):
                await schedule.serve(lambda: _transfer(training))
            # After the last step the run ends anyway, with its final evaluation.
            stops = training.stopping() and step + 1 < recipe.steps
            with training.timer.span("save"):
                if stops or _is_saved(step + 1, recipe):
                    await commits.begin(counters.state(step + 1, schedule.cursor()))
            training.emit(StepEnded(step, metrics | await training.timer.stop()))
            if stops:
                break
        else:
            # This evaluation too must not see weights that a crash could lose.
            await commits.finish()
            await schedule.settle()
            await _evaluate(training, schedule, recipe.steps)
    # A run that was stopped early stays unfinished, so the same command continues it.
    if folder.read_state().step == recipe.steps:
        folder.write_state(replace(folder.read_state(), finished=True))
    return history.read(folder.events)


async def _resume(training: Training) -> _Counters:
    """Bring trainer and engine to the committed step."""
    state, emit = training.folder.read_state(), training.emit
    if state.step:
        emit(Notice(f"resuming after step {state.step} of {training.recipe.steps}"))
        cluster = training.recipe.cluster
        await weight_sync.make_room(training.trainer, training.engine, cluster)
        await training.trainer.restore(state.step)
    versions = Versions(state.versions)
    if training.engine is not None:
        # The engine may still serve the model's original weights, or those of a lost step.
        versions.add(await _transfer(training, is_first=True))
    skips = SkipCounter(total=state.skipped, in_a_row=state.skipped_in_a_row)
    if training.recipe.schedule.mode == "async":
        num_groups = training.recipe.rollout.groups_per_step
        record.move_orphans_aside(training.folder, versions, state.cursor, num_groups, emit)
    # The steps after the committed one write their entries again.
    prompts.cut(training.folder.prompts, steps=state.step)
    return _Counters(training.folder, versions, skips)


@dataclass(slots=True)
class _Counters:
    folder: RunFolder
    versions: Versions
    skips: SkipCounter

    def record(
        self, step: int, groups: StepGroups, collected: CollectedBatch, result: UpdateResult
    ) -> dict[str, float]:
        skipped = result.skipped if result.stats else {group.task_id for group in groups.kept}
        entries = step_metrics.prompt_entries(step, groups, skipped)
        prompts.append(self.folder.prompts, entries)
        return {
            **step_metrics.metrics(groups, collected, result.stats, versions=self.versions),
            "steps_skipped": self.skips.total,
        }

    def state(self, step: int, cursor: Cursor) -> RunState:
        """Return the state that commits the first `step` steps."""
        return RunState(
            step=step,
            versions=self.versions.names,
            cursor=cursor,
            skipped=self.skips.total,
            skipped_in_a_row=self.skips.in_a_row,
        )


def _open_schedule(
    training: Training, versions: Versions, cursor: Cursor
) -> AbstractAsyncContextManager[Schedule]:
    if training.sft_episodes:
        schedule = KeptSchedule(training.sft_episodes, training.recipe, versions, training.emit)
        return nullcontext(schedule)
    return open_schedule(_schedule_inputs(training, versions), cursor)


def _schedule_inputs(training: Training, versions: Versions) -> ScheduleInputs:
    assert training.parts is not None
    return ScheduleInputs(
        tasks=training.train,
        parts=training.parts,
        folder=training.folder,
        section=training.recipe.schedule,
        steps=training.recipe.steps,
        versions=versions,
    )


async def _evaluate(training: Training, schedule: Schedule, step: int) -> None:
    splits, parts, folder = training.evals, training.parts, training.folder
    if parts is not None:
        await evaluate(splits, step, parts, folder, recipe=training.recipe, schedule=schedule)


def _collected(training: Training, step: int, groups: StepGroups) -> CollectedBatch:
    is_masked = training.recipe.rollout.truncated == "mask"
    collected = collect(step, groups.kept, training.algorithm, mask_truncated=is_masked)
    if lost := collected.lost:
        reason = "are not trained: the engine returned sampled tokens without ids"
        training.emit(Notice(f"{len(lost)} episodes, such as {lost[0]}, {reason}"))
    return collected


def _write(
    folder: RunFolder, step: int, groups: StepGroups, collected: CollectedBatch
) -> CollectedBatch:
    """Write a step's Turns, and its Batch in the file that the trainer reads."""
    # Those of an earlier attempt at this step are of other tokens.
    folder.logprobs(step).unlink(missing_ok=True)
    episodes = [episode for group in groups.all for episode in group.episodes]
    tables.write_turns(folder.turns(step), episodes)
    return replace(collected, batch=batches.write(folder.samples(step), collected.batch))


async def _learn(
    training: Training, counters: _Counters, collected: CollectedBatch
) -> UpdateResult:
    trainer, emit = training.trainer, training.emit
    path = training.folder.samples(collected.batch.step)
    await weight_sync.make_room(trainer, training.engine, training.recipe.cluster)
    parts = updates.split(collected.batch, training.recipe.trainer.updates_per_batch)
    parts = await updates.with_base(trainer, parts)
    stats = [await counters.skips.step(trainer, part, path, emit) for part in parts]
    result = updates.join_updates(parts, stats)
    if result.logprobs:
        tables.write_logprobs(training.folder.logprobs(collected.batch.step), result.logprobs)
    return result


async def _transfer(training: Training, *, is_first: bool = False) -> str:
    """Send the trainer's weights to the engine, or to the run folder; return their version."""
    if training.engine is None:
        return (await training.trainer.publish()).version
    parts = training.trainer, training.engine, training.recipe.cluster, training.emit
    return await weight_sync.sync(*parts, is_first=is_first)


def _is_saved(step: int, recipe: Recipe) -> bool:
    """Return whether a step gets a checkpoint: every n-th, evaluated ones, and the last."""
    return (
        step % recipe.trainer.save_every == 0 or is_due(step, recipe.eval) or step == recipe.steps
    )


class Commits:
    """Begin checkpoints and commit their steps; leaving the context waits for the last one.

    A checkpoint is written while the run continues, so a crash loses at most the work since the
    last whole one; Episodes that were finished by then are reused.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        self._trainer = trainer
        self._folder = folder
        self._saving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Commits:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # If the trainer has failed, the outcome of its save may never come.
        if error and self._saving:
            self._saving.cancel()
            await asyncio.wait({self._saving})
        else:
            await self.finish()

    async def begin(self, state: RunState) -> None:
        """Begin the checkpoint of `state.step` once the one before it is whole.

        `state` is written when this checkpoint is whole. Raises TrainerError if the one before
        could not be written.
        """
        await self.finish()
        # The checkpoint of the best evaluation is never pruned.
        best = self._folder.read_state().best
        await self._trainer.save(state.step, kept=() if best is None else (best.step,))
        self._saving = asyncio.create_task(self._commit(state))

    async def finish(self) -> None:
        """Wait until the checkpoint under way is whole and its step committed."""
        if self._saving:
            await self._saving
            self._saving = None

    async def _commit(self, state: RunState) -> None:
        await self._trainer.saved()
        # An evaluation may have written its own result to the state since.
        current = self._folder.read_state()
        self._folder.write_state(replace(state, evals_done=current.evals_done, best=current.best))
