"""A Recipe becomes a Machine: Tasks, model, nodes, trainer, engine, gateway, in this order.

What is opened later may use what was opened before; everything is closed in the opposite order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from swerl.cluster.open import Nodes, open_nodes
from swerl.cluster.preflight import require_fit
from swerl.core.contracts import EngineSetup
from swerl.core.events import Emit, Notice, Progress, fan_out
from swerl.core.experts import open_spool
from swerl.plan.disk import plan_disk
from swerl.plan.shape import shape_of
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import (
    algorithm_of,
    family_of,
    gate_of,
    gateway_of,
    open_engine,
    open_sandboxes,
    parts_of,
    tasks_of,
)
from swerl.runs.layout import RunFolder
from swerl.runs.presence import Part, Presence
from swerl.training import loop
from swerl.training.accounts import Accounts
from swerl.training.learning_side import initial_model, trainer_of
from swerl.training.meter import Meter
from swerl.training.trainable import check_trainable
from swerl.training.trainer import MegatronTrainer
from swerl.training.weight_sync.sync import choose_way


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
        gate = gate_of(recipe, engine)
        with open_spool(folder.spool) as spool:
            async with (
                open_sandboxes(recipe, nodes.all, logs=logs, emit=emit) as backend,
                gateway_of(recipe, gate or engine, setup, emit, spool=spool) as gateway,
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
                    gate=gate,
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
