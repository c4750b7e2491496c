"""x"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from swerl.cluster.node import Node
from swerl.cluster.open import Nodes, open_nodes
from swerl.cluster.preflight import require_fit
from swerl.core.contracts import EngineSetup, Family
from swerl.core.errors import InputError, RankLostError
from swerl.core.events import Emit, Notice, Progress, fan_out
from swerl.core.experts import open_spool
from swerl.core.files import disk_errors
from swerl.plan.plan import plan_disk
from swerl.plan.shape import shape_of
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import (
    algorithm_of,
    draining_of,
    family_of,
    gateway_of,
    open_engine,
    open_sandboxes,
    parts_of,
    reap_leftovers,
    tasks_of,
)
from swerl.runs import history
from swerl.runs.history import EventLog, History
from swerl.runs.layout import RunFolder, open_run
from swerl.runs.status import Part, Presence, present, require_alone
from swerl.training import loop
from swerl.training.metrics import open_sinks
from swerl.training.options import TrainerOptions
from swerl.training.picture import draw
from swerl.training.step_metrics import Meter
from swerl.training.trainer import MegatronTrainer
from swerl.training.usage import Accounts
from swerl.training.warm_start import warm_start
from swerl.training.weight_sync.sync import choose_way


async def train(recipe: Recipe, root: Path, show: Emit) -> History:
    """Run a recipe in its run folder to the end, or on from where it stands."""
    if recipe.tasks.source != "twin" and not root.exists():
        await asyncio.to_thread(tasks_of, recipe, root)  # what is refused leaves no run behind
    await require_alone(root, tell=lambda text: show(Notice(text)))
    with open_run(root, recipe.model_dump(mode="json")) as folder, EventLog(folder.events) as log:
        if folder.read_state().finished:
            return history.read(folder.events)
        with open_sinks(recipe, root, fan_out(log, show)) as sinks:
            accounts = Accounts(recipe, fan_out(log, show, sinks), history.read(folder.events))
            async with present(root) as presence:
                await reap_leftovers(recipe, accounts)
                past = await _despite_deaths(recipe, folder, accounts, presence)
    with disk_errors(root):
        draw(root, past)
    return past


async def _despite_deaths(
    recipe: Recipe, folder: RunFolder, accounts: Accounts, presence: Presence
) -> History:
    """Train to the end; where a rank is lost, start again as often as the recipe allows."""
    left = recipe.trainer.restarts
    while True:
        try:
            async with open_machine(recipe, folder, accounts, presence) as machine:
                return await loop.run(machine)
        except (RankLostError, ExceptionGroup) as error:
            if not left or not _is_a_lost_rank(error):
                raise
            left -= 1
            told = f"{error}; starting again from the last checkpoint; restarts left: {left}"
            accounts(Notice(told))


def _is_a_lost_rank(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_a_lost_rank(each) for each in error.exceptions)
    return isinstance(error, RankLostError)


@asynccontextmanager
async def open_machine(
    recipe: Recipe, folder: RunFolder, accounts: Accounts, presence: Presence
) -> AsyncIterator[loop.Machine]:
    """Open all parts of a run, ready for `loop.run`."""
    logs = folder.new_attempt()
    accounts(Progress("reading or writing tasks", 0, 1))
    train, evals = await asyncio.to_thread(tasks_of, recipe, folder.scratch)
    model = await initial_model(recipe, folder, logs, accounts)
    family = family_of(recipe, model)
    check_trainable(family, model)
    setup = EngineSetup(family=family, log_dir=logs, model=model)
    accounts(Progress("starting trainer and engine", 0, 1))
    async with (
        open_nodes(recipe, logs, tell=lambda text: accounts(Notice(text))) as nodes,
        _fit(recipe, nodes, folder, accounts),
        trainer_of(recipe, folder, model, logs, nodes.trainer) as trainer,
        open_engine(recipe, nodes, setup, accounts) as engine,
    ):
        presence.has(_parts_at_work(trainer))
        meter = Meter(engine)
        emit = fan_out(meter, accounts)
        choose_way(recipe.cluster, engine, emit)
        draining = draining_of(recipe, engine)
        with open_spool(folder.spool) as spool:
            async with (
                open_sandboxes(recipe, nodes.all, logs=logs, emit=emit) as backend,
                gateway_of(recipe, draining or engine, setup, emit, spool=spool) as gateway,
            ):
                yield loop.Machine(
                    recipe=recipe,
                    folder=folder,
                    train=train,
                    evals=evals,
                    engine=engine,
                    trainer=trainer,
                    algorithm=algorithm_of(recipe),
                    parts=replace(parts_of(recipe, gateway, emit, backend), spool=spool),
                    meter=meter,
                    draining=draining,
                    stopping=lambda: presence.stopping() or accounts.is_spent(),
                )


@asynccontextmanager
async def _fit(recipe: Recipe, nodes: Nodes, folder: RunFolder, emit: Emit) -> AsyncIterator[None]:
    """Look at the machines of a cluster before anything starts there. Raises ClusterError."""
    if recipe.cluster.launcher != "local":
        emit(Progress("checking machines", 0, len(nodes.all)))
        disk_bytes = plan_disk(recipe, shape_of(recipe.model)).most
        await require_fit(recipe, nodes, folder.root, disk_bytes=disk_bytes)
    yield


def _parts_at_work(trainer: MegatronTrainer) -> tuple[Part, ...]:
    found = enumerate(zip(trainer.pids, trainer.hosts, strict=True))
    return tuple(Part(f"trainer-rank{rank}", pid, host) for rank, (pid, host) in found)


def check_trainable(family: Family, model: Path) -> None:
    """Raise InputError on a model folder whose weights Megatron-Core has no place for."""
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {file}: {error}", hint="name a model folder in Hugging Face format"
        ) from error
    family.megatron().config(config)


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
