"""The training loop: roll out, grade, learn, publish, commit; then the next step.

A step is committed when `state.json` moves. What was finished before a crash is read back, so
the same command goes on where the last one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swerl.interfaces import Algorithm, Engine, Trainer
from swerl.learning import StepStats
from swerl.recipe.schema import Recipe
from swerl.rollout import scheduler
from swerl.rollout.parts import Parts
from swerl.rollout.scheduler import StepGroups
from swerl.run import history, tables
from swerl.run.events import EvalEnded, StepEnded
from swerl.run.layout import RunFolder
from swerl.task import Task
from swerl.training import batch as batches
from swerl.training.collect import Collected, collect
from swerl.training.meter import Meter


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


async def run(machine: Machine) -> history.History:
    """Train to the recipe's last step, from wherever the run folder stands."""
    folder, recipe = machine.folder, machine.recipe
    version = await _resume(machine)
    for step in range(folder.read_state().step, recipe.steps):
        if step == 0 or (recipe.eval.every and step % recipe.eval.every == 0):
            await _evaluate(machine, step)
        machine.meter.start()
        groups = await scheduler.run_step(machine.train, step, machine.parts, folder)
        collected = collect(step, groups.kept, machine.algorithm)
        _write_tables(folder, step, groups, collected)
        with machine.meter.span("train"):
            stats = await machine.trainer.step(collected.batch)
        metrics = _metrics(groups, collected, stats, version=version)
        with machine.meter.span("publish"):
            version = await _publish(machine)
            await machine.trainer.save(step + 1)
        machine.parts.emit(StepEnded(step, metrics | await machine.meter.stop()))
        folder.write_state(replace(folder.read_state(), step=step + 1))
    await _evaluate(machine, recipe.steps)
    folder.write_state(replace(folder.read_state(), finished=True))
    return history.read(folder.events)


async def _resume(machine: Machine) -> str:
    """Bring trainer and engine to the committed step; return the version that serves."""
    step = machine.folder.read_state().step
    if step:
        await machine.trainer.restore(step)
    return await _publish(machine)


async def _publish(machine: Machine) -> str:
    weights = await machine.trainer.publish()
    return await machine.engine.load(weights)


async def _evaluate(machine: Machine, step: int) -> None:
    """Measure the solve rate of every split, once per step however often the run resumes."""
    folder = machine.folder
    for split, tasks in machine.evals.items():
        name = f"eval-{split}-{step:05d}"
        if not tasks or name in folder.read_state().evals_done:
            continue
        groups = await scheduler.evaluate(tasks, name, machine.parts, folder)
        episodes = [e for group in groups for e in group.episodes if e.learnable]
        rate = sum(e.verdict == "solved" for e in episodes) / max(len(episodes), 1)
        machine.parts.emit(EvalEnded(step, split, rate, len(episodes)))
        state = folder.read_state()
        folder.write_state(replace(state, evals_done=(*state.evals_done, name)))


def _write_tables(folder: RunFolder, step: int, groups: StepGroups, collected: Collected) -> None:
    episodes = [episode for group in groups.all for episode in group.episodes]
    tables.write_turns(folder.turns(step), episodes)
    batches.write(folder.samples(step), collected.batch)


def _metrics(
    groups: StepGroups, collected: Collected, stats: StepStats, *, version: str
) -> dict[str, float]:
    """Return what a step came to; rates are over the Episodes that can be learned from.

    They count Groups that were left out too: a filter must not make the policy look better.
    """
    episodes = [episode for group in groups.all for episode in group.episodes]
    learnable = [episode for episode in episodes if episode.learnable]
    sampled = sum(episode.trajectory.num_sampled_tokens for episode in learnable)
    everything = sum(episode.trajectory.num_sampled_tokens for episode in episodes)
    turns = [turn for episode in learnable for turn in episode.trajectory.turns]
    count = max(len(learnable), 1)
    return {
        "time": time.time(),
        "reward": sum(e.reward for e in learnable) / count,
        "solve_rate": sum(e.verdict == "solved" for e in learnable) / count,
        "timeout_rate": sum(e.verdict == "timeout" for e in learnable) / count,
        "infra_episodes": len(episodes) - len(learnable),
        "groups_with_signal": sum(group.has_signal for group in groups.all),
        "groups_left_out": len(groups.left_out),
        "left_out_tokens": sampled - collected.num_sampled_tokens,
        "turns_per_episode": len(turns) / count,
        "sampled_tokens": sampled,
        "trained_tokens": stats.num_tokens,
        "lost_tokens": everything - sampled,
        "dropped_tokens": sum(sum(e.trajectory.dropped.values()) for e in learnable),
        "stale_turns": sum(turn.weight_version != version for turn in turns),
        "malformed_calls": sum(turn.malformed_calls for turn in turns),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "mismatch": stats.mismatch,
        **stats.extra,
    }
