"""Take a recorded step again, with another algorithm or other rewards, and report its figures.

The trainer begins with the weights before that step. Nothing is sampled, sent or saved.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from swerl.cluster.open import open_nodes
from swerl.core.episode import Episode, Group
from swerl.core.errors import InputError, RunError
from swerl.core.learning import Batch
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import INITIAL_MODEL
from swerl.rollout import record
from swerl.rollout.rescore import Rescored
from swerl.rollout.wiring import algorithm_of
from swerl.runs.layout import RunFolder
from swerl.training import batch as batches
from swerl.training import updates
from swerl.training.checkpoint import folder as checkpoints
from swerl.training.train import trainer_of

_COSTS = ("_s", "_gib", "executed_tokens", "executed_token_pairs", "lr")
"""Ends of the names of figures that say how fast a step was, not what it learned."""


def step_to_retake(run: Path, step: int | None = None) -> int:
    """Return a step whose Samples and earlier weights a run folder holds; by default the last one.

    Raises InputError if there is none, or if `step` is none of them.
    """
    folder = RunFolder(run)
    weights = {0, *checkpoints.steps(folder.checkpoints)}
    usable = [number for number in folder.trained_steps() if number in weights]
    if not usable or step not in (None, *usable):
        there = ", ".join(map(str, usable)) or "none; trainer.save_every keeps more checkpoints"
        raise InputError(
            f"{run} has no weights from before step {step or 'any'}",
            hint=f"steps that can be taken again: {there}",
        )
    return usable[-1] if step is None else step


async def retake(
    recipe: Recipe, run: Path, step: int, episodes: Sequence[Rescored]
) -> Mapping[str, float]:
    """Return the figures of a step under the recipe's algorithm and the Episodes' new rewards.

    Raises InputError if an Episode of the step is not among them, RunError and TrainerError.
    """
    folder = RunFolder(run)
    recorded = batches.read(folder.samples(step))
    batch = _with_advantages(recorded, _groups(recorded, run, episodes), recipe)
    model = recipe.model.path or run / INITIAL_MODEL
    if not model.is_dir():
        raise RunError(f"the run's first model {model} is gone", hint="restore the folder")
    logs = Path(tempfile.mkdtemp(prefix="swerl-retake-"))
    async with (
        open_nodes(recipe) as nodes,
        trainer_of(recipe, folder, model, logs, nodes.trainer) as trainer,
    ):
        if step:
            await trainer.restore(step)
        parts = updates.split(batch, recipe.trainer.updates_per_batch)
        reports = [await trainer.step(part) for part in await updates.with_base(trainer, parts)]
    shutil.rmtree(logs)  # An error names these logs.
    stats = updates.join_stats(reports)
    if stats is None:
        return {}
    # Speed and memory say nothing of the loss.
    extra = {name: value for name, value in stats.extra.items() if not name.endswith(_COSTS)}
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "mismatch": stats.mismatch, **extra}


def _groups(batch: Batch, run: Path, episodes: Sequence[Rescored]) -> list[Group]:
    """Return the Groups that have an Episode in the Batch, with the new rewards."""
    folders = {run / "episodes" / sample.episode for sample in batch.samples}
    names = {scored.group for scored in episodes if scored.folder in folders}
    members: dict[str, list[Episode]] = defaultdict(list)
    for scored in episodes:
        if scored.group in names:
            episode = record.read(scored.folder)
            members[scored.group].append(replace(episode, reward=scored.reward))
    return [Group(group[0].task_id, tuple(group), group[0].agent) for group in members.values()]


def _with_advantages(batch: Batch, groups: Sequence[Group], recipe: Recipe) -> Batch:
    rows = batches.advantages_of(groups, algorithm_of(recipe))
    advantage_of = {
        episode.id: advantage
        for group, row in zip(groups, rows, strict=True)
        for episode, advantage in zip(group.episodes, row, strict=True)
    }
    if missing := sorted({sample.episode for sample in batch.samples} - advantage_of.keys()):
        raise InputError(
            f"{len(missing)} Episodes of step {batch.step} have no reward, such as {missing[0]}",
            hint="episodes/ of the run must hold them, undamaged",
        )
    samples = (replace(row, advantage=advantage_of[row.episode]) for row in batch.samples)
    return replace(batch, samples=tuple(samples))
