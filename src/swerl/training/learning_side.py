"""The side that learns: the model that a run begins with, and its trainer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from swerl.cluster.node import Node
from swerl.core.events import Emit
from swerl.core.files import disk_errors
from swerl.recipe.schema import Recipe
from swerl.runs.layout import RunFolder
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warmstart import warm_start


async def initial_model(recipe: Recipe, folder: RunFolder, logs: Path, emit: Emit) -> Path:
    """Return the run's initial model, copied into its folder so that the cache may go."""
    if recipe.model.path is not None:
        return recipe.model.path
    kept = folder.root / "initial_model"
    if not kept.exists():
        made = await warm_start(recipe, log_dir=logs, emit=emit)
        partial = kept.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        with disk_errors(kept):
            partial.mkdir()
            for path in made.iterdir():
                shutil.copy2(path, partial)
            partial.replace(kept)
    return kept


def trainer_of(
    recipe: Recipe, folder: RunFolder, model: Path, logs: Path, nodes: Sequence[Node]
) -> MegatronTrainer:
    """Return the recipe's trainer on these machines, to be entered."""
    return MegatronTrainer(
        nodes=nodes,
        model=model,
        family=recipe.model.family,
        algorithm=recipe.algorithm.type,
        algorithm_options=recipe.algorithm.options,
        options=TrainerOptions(
            **recipe.trainer.model_dump(),
            steps=recipe.steps * recipe.trainer.updates_per_batch,
            seed=recipe.seed,
            temperature=recipe.rollout.temperature,
            checkpoint_dir=folder.checkpoints,
            publish_dir=folder.weights,
            log_dir=logs,
            weight_bucket_mib=recipe.cluster.weight_bucket_mib,
            weight_bucket_s=recipe.cluster.weight_bucket_s,
        ),
    )
