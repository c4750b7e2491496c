"""Run `swerl train`: open all parts of a run in order, train, and restart after a lost rank.

A part may use the parts that were opened before it; everything is closed in the opposite order.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from swerl.cluster.checks import require_fit
from swerl.cluster.node import Node
from swerl.cluster.open import Nodes, open_nodes
from swerl.core import plugins
from swerl.core.contracts import EngineSetup, Family
from swerl.core.errors import RankLostError, RecipeError
from swerl.core.events import Emit, Notice, Progress, fan_out
from swerl.core.experts import open_spool
from swerl.core.files import disk_errors
from swerl.core.task import Task
from swerl.plan.plan import kernel_modules, plan_disk
from swerl.plan.shape import shape_of
from swerl.recipe.schema import Recipe
from swerl.recipe.sections import INITIAL_MODEL
from swerl.rollout.kept import KeptEpisode, Reader, open_kept
from swerl.rollout.wiring import (
    algorithm_of,
    family_of,
    gateway_of,
    open_engine,
    open_sandboxes,
    parts_of,
    reap_leftovers,
    tasks_of,
)
from swerl.runs import history
from swerl.runs.history import EventLog, RunHistory
from swerl.runs.layout import RunFolder, open_run
from swerl.runs.status import RunOwner, RunPart, own_run, require_unused
from swerl.tasks.admission import require_unchanged
from swerl.training import loop
from swerl.training.efficiency import CostMeter
from swerl.training.metric_sinks import open_sinks
from swerl.training.model_folder import read_config
from swerl.training.options import TrainerOptions
from swerl.training.step_metrics import StepTimer
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import warm_start
from swerl.training.weight_sync import sync as weight_sync
from swerl.training.weight_sync.sync import choose_way, shares_gpus


async def train(recipe: Recipe, root: Path, show: Emit) -> RunHistory:
    """Run a recipe in its run folder to the end; a run that exists already is resumed."""
    if recipe.tasks.source != "twin" and not root.exists():
        await asyncio.to_thread(tasks_of, recipe, root)  # an error here leaves no run folder behind
    await require_unused(root, notify=lambda text: show(Notice(text)))
    with open_run(root, recipe.model_dump(mode="json")) as folder, EventLog(folder.events) as log:
        state = folder.read_state()
        if state.finished and state.step == recipe.steps:
            return history.read(folder.events)
        if state.finished:  # more steps are asked for
            folder.write_state(replace(state, finished=False))
        with open_sinks(recipe, root, fan_out(log, show)) as sinks:
            past, emit = history.read(folder.events), fan_out(log, show, sinks)
            costs = CostMeter(recipe, emit, past, file=root / "cost.json")
            for change in folder.changes:
                costs(Notice(f"the recipe has changed since the last start: {change}"))
            async with costs.watched(), own_run(root) as owner:
                # The owner alone may reap: another live process could still use the sandboxes.
                await reap_leftovers(recipe, costs)
                return await _train_with_restarts(recipe, folder, costs, owner)


async def _train_with_restarts(
    recipe: Recipe, folder: RunFolder, costs: CostMeter, owner: RunOwner
) -> RunHistory:
    """Train to the end; after a lost rank, restart as often as the recipe allows."""
    num_restarts = recipe.trainer.restarts
    while True:
        try:
            async with open_training(recipe, folder, costs, owner) as training:
                return await loop.run(training)
        except (RankLostError, ExceptionGroup) as error:
            if not num_restarts or not _is_lost_rank(error):
                raise
            num_restarts -= 1
            costs(
                Notice(
                    f"{error}; restarting from the last checkpoint; restarts left: {num_restarts}"
                )
            )


def _is_lost_rank(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_lost_rank(part) for part in error.exceptions)
    return isinstance(error, RankLostError)


@asynccontextmanager
async def open_training(
    recipe: Recipe, folder: RunFolder, costs: CostMeter, owner: RunOwner
) -> AsyncIterator[loop.Training]:
    logs = folder.new_attempt()
    costs(Progress("reading or writing tasks", 0, 1))
    # Reading many tasks takes a while, and the event loop must stay free.
    train, evals = await asyncio.to_thread(_tasks, recipe, folder)
    model = await initial_model(recipe, folder, logs, costs)
    family = family_of(recipe, model)
    check_trainable(family, model)
    sft_episodes = await asyncio.to_thread(_kept, recipe, folder, family, model, evals, costs)
    async with (
        open_nodes(recipe, notify=lambda text: costs(Notice(text))) as nodes,
        _checked(recipe, nodes, folder, costs),
        trainer_of(recipe, folder, model, logs, nodes.trainer) as trainer,
    ):
        training = loop.Training(
            recipe=recipe,
            folder=folder,
            train=train,
            evals=evals,
            engine=None,
            trainer=trainer,
            algorithm=algorithm_of(recipe),
            parts=None,
            emit=costs,
            timer=StepTimer(None),
            sft_episodes=sft_episodes,
            stopping=lambda: owner.stop_requested() or costs.ends_run(),
        )
        if sft_episodes and not recipe.sft.evaluate:
            owner.record_parts(_rank_processes(trainer))
            yield training
            return
        setup = EngineSetup(family=family, log_dir=logs, model=model)
        async with _with_rollouts(training, trainer, nodes, setup, costs, owner) as training:
            yield training


@asynccontextmanager
async def _with_rollouts(
    training: loop.Training,
    trainer: MegatronTrainer,
    nodes: Nodes,
    setup: EngineSetup,
    costs: CostMeter,
    owner: RunOwner,
) -> AsyncIterator[loop.Training]:
    """Open the engine, the sandboxes and the gateway of a run, and add them to its parts."""
    recipe = training.recipe
    costs(Progress("starting trainer and engine", 0, 1))
    async with (
        _asleep(trainer, recipe),
        open_engine(recipe, nodes, setup, costs) as engine,
    ):
        owner.record_parts(_rank_processes(trainer))
        timer = StepTimer(engine)
        emit = fan_out(timer, costs)
        # An engine that lacks the recipe's way of sending fails here, before any rollout.
        choose_way(recipe.cluster, engine, emit)
        with open_spool(training.folder.spool) as spool:
            # The gateway closes before the sandboxes whose agents call it.
            async with (
                weight_sync.resending(trainer, engine, recipe.cluster),
                open_sandboxes(recipe, nodes.all, logs=setup.log_dir, emit=emit) as backend,
                gateway_of(recipe, engine, setup, emit, spool=spool) as gateway,
            ):
                yield replace(
                    training,
                    engine=engine,
                    parts=replace(parts_of(recipe, gateway, emit, backend), spool=spool),
                    emit=emit,
                    timer=timer,
                )


def _tasks(recipe: Recipe, folder: RunFolder) -> tuple[list[Task], dict[str, list[Task]]]:
    """Return the training Tasks, and the evaluation Tasks by split.

    Raises RecipeError if a file of Tasks has changed since the run began.
    """
    train, evals = tasks_of(recipe, folder.scratch)
    # Generated Tasks follow from the recipe, and name paths of this machine.
    generated = f"dir:{folder.scratch}"
    tasks = (task for split in (train, *evals.values()) for task in split)
    from_files = (task for task in tasks if not task.image.startswith(generated))
    require_unchanged(folder.root / "tasks.json", from_files)
    return train, evals


def _kept(
    recipe: Recipe,
    folder: RunFolder,
    family: Family,
    model: Path,
    evals: Mapping[str, Sequence[Task]],
    emit: Emit,
) -> list[KeptEpisode]:
    """Return the recorded Episodes to train on; none if the recipe samples its own.

    Raises RecipeError if one of their Tasks is also evaluated.
    """
    if not recipe.sft.sources:
        return []
    emit(Progress("choosing recorded episodes", 0, 1))
    reader = Reader(
        family=family,
        family_name=plugins.family_name(recipe.model.family, model),
        model=model,
        vocab_size=shape_of(recipe.model).vocab_size,
        max_tokens=recipe.trainer.tokens_per_micro_batch * recipe.trainer.context_parallel,
    )
    episodes = open_kept(recipe, folder.root, reader, emit)
    heldout = {task.id for tasks in evals.values() for task in tasks}
    if both := sorted({episode.task for episode in episodes} & heldout):
        raise RecipeError(
            f"{len(both)} tasks of sft.sources are evaluated as well, such as {both[0]}",
            hint="take them out of tasks.heldout, or name other sft.sources",
        )
    return episodes


async def initial_model(recipe: Recipe, folder: RunFolder, logs: Path, emit: Emit) -> Path:
    """Return the run's initial model. A warm-started one is copied, so the cache may be deleted."""
    if recipe.model.path is not None:
        return recipe.model.path
    folder_of_run = folder.root / INITIAL_MODEL
    if not folder_of_run.exists():
        model = await warm_start(recipe, log_dir=logs, emit=emit)
        # Half a copy never has the final name.
        partial = folder_of_run.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        with disk_errors(folder_of_run):
            partial.mkdir()
            for path in model.iterdir():
                shutil.copy2(path, partial)
            partial.replace(folder_of_run)
    return folder_of_run


def check_trainable(family: Family, model: Path) -> None:
    """Raise InputError if Megatron-Core cannot hold the model's weights."""
    family.megatron().config(read_config(model))


@asynccontextmanager
async def _checked(
    recipe: Recipe, nodes: Nodes, folder: RunFolder, emit: Emit
) -> AsyncIterator[None]:
    """Check GPUs and clusters before anything starts there. Raises ClusterError."""
    if recipe.cluster.launcher != "local" or recipe.cluster.gpus_per_node:
        emit(Progress("checking machines", 0, len(nodes.all)))
        shape = shape_of(recipe.model)
        disk_bytes, modules = plan_disk(recipe, shape).most, kernel_modules(recipe, shape)
        await require_fit(recipe, nodes, folder.root, disk_bytes=disk_bytes, modules=modules)
    yield


@asynccontextmanager
async def _asleep(trainer: MegatronTrainer, recipe: Recipe) -> AsyncIterator[None]:
    """Put the trainer to sleep before an engine on its GPUs measures how much memory is free."""
    if shares_gpus(recipe.cluster):
        await trainer.sleep()
    yield


def trainer_of(
    recipe: Recipe, folder: RunFolder, model: Path, logs: Path, nodes: Sequence[Node]
) -> MegatronTrainer:
    return MegatronTrainer(
        nodes=nodes,
        model=model,
        family=plugins.family_name(recipe.model.family, model),
        algorithm=recipe.algorithm.type,
        algorithm_options=recipe.algorithm.options,
        options=TrainerOptions(
            **recipe.trainer.model_dump(),
            # The learning rate counts optimizer steps, and a step of the run may take several.
            steps=recipe.steps * recipe.trainer.updates_per_batch,
            seed=recipe.seed,
            # Demonstrations are learned as they are; only a sampled policy has a temperature.
            temperature=1.0 if recipe.algorithm.type == "sft" else recipe.rollout.temperature,
            checkpoint_dir=folder.checkpoints,
            publish_dir=folder.weights,
            log_dir=logs,
        ),
    )


def _rank_processes(trainer: MegatronTrainer) -> tuple[RunPart, ...]:
    ranks = enumerate(zip(trainer.pids, trainer.hosts, strict=True))
    return tuple(RunPart(f"trainer-rank{rank}", pid, host) for rank, (pid, host) in ranks)
