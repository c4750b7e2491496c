"""A whole RL loop on the twin, readable top to bottom: `python examples/rl_loop.py --steps 3`.

Two CPU cores, no GPU. Every part is real: tasks with hidden tests, a sandbox for each attempt, an
agent that sends HTTP requests to the gateway, grading in a second sandbox, Megatron-Core on two
ranks, and new weights in the engine after each step. `swerl train` runs the same parts and adds
checkpoints, resume, evaluation and asynchronous schedules (`src/swerl/training/loop.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from swerl.core.contracts import Algorithm, Engine, EngineSetup
from swerl.core.episode import Episode, Group
from swerl.core.events import Event, Progress
from swerl.core.learning import Batch, StepStats
from swerl.core.sample import Sample, to_samples
from swerl.core.task import Task
from swerl.plan.plan import plan
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe
from swerl.rollout import episode, wiring
from swerl.rollout.parts import Parts
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import warm_start


@dataclass(frozen=True, slots=True)
class Loop:
    """The open parts of a run."""

    tasks: Sequence[Task]
    parts: Parts
    algorithm: Algorithm
    trainer: MegatronTrainer
    engine: Engine


async def main(recipe: Recipe, folder: Path) -> None:
    """Train for `recipe.steps` steps and print a line for each."""
    async with open_loop(recipe, folder) as loop:
        for step in range(recipe.steps):
            groups = await roll_out(loop, step, recipe.rollout.groups_per_step)
            batch = to_batch(loop.algorithm, step, groups)
            stats = await loop.trainer.step(batch)
            # The next step samples from the new weights: this loop is on-policy.
            version = await loop.engine.load(await loop.trainer.publish())
            print(line(step, groups, batch, stats, version), flush=True)


async def roll_out(loop: Loop, step: int, num_groups: int) -> list[Group]:
    """Attempt the step's Tasks, each `episodes_per_group` times, all attempts at once."""
    first = step * num_groups
    tasks = [loop.tasks[i % len(loop.tasks)] for i in range(first, first + num_groups)]
    size = loop.parts.rollout.episodes_per_group

    async def attempt(task: Task, number: int) -> Episode:
        # A slot bounds the open sandboxes. It is taken before the attempt's time budget starts.
        async with loop.parts.sandboxes.slot:
            return await episode.run(task, f"{step:05d}/{task.id}.{number}", loop.parts)

    async with asyncio.TaskGroup() as running:
        started = {
            task.id: [running.create_task(attempt(task, k)) for k in range(size)] for task in tasks
        }
    return [Group(id, tuple(each.result() for each in made)) for id, made in started.items()]


def to_batch(algorithm: Algorithm, step: int, groups: Sequence[Group]) -> Batch:
    """Turn graded attempts into token rows with advantages.

    An attempt becomes one row, or several if the agent started sub-agents or rewrote its history.
    All of its rows have its advantage, and together they weigh as one attempt.
    """
    rows: list[Sample] = []
    num_episodes = 0
    for group, advantages in zip(groups, algorithm.advantages(groups), strict=True):
        for attempt, advantage in zip(group.episodes, advantages, strict=True):
            if not attempt.learnable:  # the infrastructure failed: no reward
                continue
            own = to_samples(attempt.trajectory, episode=attempt.id, task=attempt.task_id)
            rows += [replace(row, advantage=advantage) for row in own]
            num_episodes += bool(own)
    return Batch(step, tuple(rows), num_episodes)


def line(step: int, groups: Sequence[Group], batch: Batch, stats: StepStats, version: str) -> str:
    """Return a summary of a step."""
    rewards = [attempt.reward for group in groups for attempt in group.episodes]
    return (
        f"step {step}: reward {sum(rewards) / len(rewards):.2f}, {len(rewards)} attempts, "
        f"{len(batch.samples)} rows, {stats.num_tokens} tokens trained, "
        f"grad norm {stats.grad_norm:.2f}, mismatch {stats.mismatch:.1e}, weights {version}"
    )


@asynccontextmanager
async def open_loop(recipe: Recipe, folder: Path) -> AsyncIterator[Loop]:
    """Open the parts in the order of their needs; they close in the opposite order."""
    tasks, _ = wiring.tasks_of(recipe, folder / "tasks")
    model = await warm_start(recipe, log_dir=folder / "logs", emit=show)
    setup = EngineSetup(wiring.family_of(recipe, model), folder / "logs", model)
    trainer = MegatronTrainer(
        model=model,
        family=recipe.model.family,
        algorithm=recipe.algorithm.type,
        algorithm_options=recipe.algorithm.options,
        options=TrainerOptions(
            **recipe.trainer.model_dump(),
            steps=recipe.steps,
            temperature=recipe.rollout.temperature,
            checkpoint_dir=folder / "checkpoints",
            publish_dir=folder / "weights",
            log_dir=folder / "logs",
        ),
    )
    async with trainer, wiring.engine_of(recipe, setup) as opened:
        engine = cast(Engine, opened)  # a chat engine has no weights, and is for evaluation only
        await engine.load(await trainer.publish())
        async with wiring.gateway_of(recipe, engine, setup) as gateway:
            parts = wiring.parts_of(recipe, gateway, show)
            yield Loop(tasks, parts, wiring.algorithm_of(recipe), trainer, engine)


def show(event: Event) -> None:
    """Print the progress of the warm start."""
    if isinstance(event, Progress) and event.done % max(event.total // 5, 1) == 0:
        print(event.in_words(), flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", default="3", help="optimizer steps")
    arguments.add_argument("--recipe", type=Path, default=Path("recipes/twin_cpu.toml"))
    arguments.add_argument("--set", action="append", default=[], help="a recipe key: a.b=value")
    given = arguments.parse_args()
    recipe = load([given.recipe], [f"steps={given.steps}", *given.set])
    for fault in plan(recipe).obstacles:  # a missing package, before anything starts
        raise SystemExit(f"error: {fault.explained()}")
    print("making tasks and a model that can call its tools …", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-loop-") as work:
        asyncio.run(main(recipe, Path(work)))
