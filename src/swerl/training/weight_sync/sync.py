"""Bring the trainer's weights into the engine, between learning and sampling.

There are three ways, the fastest first: `tensor` shares memory between trainer and engine,
`distributed` broadcasts, `disk` writes a folder. After each of them, either all of the weights
serve or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from swerl.core.contracts import Engine, StreamedEngine, Trainer
from swerl.core.errors import EngineError, EngineLostError, RecipeError, TrainerError
from swerl.core.events import Emit, Notice, ignore
from swerl.core.learning import Received
from swerl.recipe.schema import ClusterSection

_TRIES = 3
"""Times that an update is sent because every server was lost in it."""


def choose_way(cluster: ClusterSection, engine: Engine, emit: Emit) -> str:
    """Return the recipe's way of sending weights. Raises RecipeError if the engine lacks it.

    A Notice is emitted if `auto` falls back to the disk although there are GPUs.
    """
    streams = isinstance(engine, StreamedEngine) and getattr(engine, "streams", True)
    way = cluster.weight_sync
    if way == "auto":
        if not cluster.gpus_per_node:
            return "disk"
        way = "tensor" if cluster.colocate else "distributed"
        if not streams:
            emit(Notice(f"weights go through the disk: this engine does not take them by {way}"))
            return "disk"
    if way != "disk" and not streams:
        raise RecipeError(
            f'this engine does not take weights by cluster.weight_sync = "{way}"',
            hint='use "disk", or engine.type = "sglang"',
        )
    return way


def shares_gpus(cluster: ClusterSection) -> bool:
    """Return whether trainer and engine use the same GPUs in turns."""
    return cluster.colocate and cluster.gpus_per_node > 0


async def make_room(trainer: Trainer, engine: Engine | None, cluster: ClusterSection) -> None:
    """Hand shared GPUs from the engine to the trainer, for a step or a restore.

    The next `sync` hands them back, together with the weights.
    """
    if engine is None or not shares_gpus(cluster):
        return
    if isinstance(engine, StreamedEngine):
        await engine.sleep()
    await trainer.wake()


async def sync(
    trainer: Trainer,
    engine: Engine,
    cluster: ClusterSection,
    emit: Emit,
    *,
    is_first: bool = False,
) -> str:
    """Load the trainer's weights into the engine; return their version.

    The first update of a run emits a Notice if checksums confirm only some parameters. Raises
    EngineError if no server received all of them, TrainerError if the trainer failed.
    """
    way = choose_way(cluster, engine, ignore)
    if shares_gpus(cluster):
        # The engine takes its memory back while it receives the weights from the host's copy.
        await trainer.sleep()
    if way == "disk":
        return await engine.load(await trainer.publish())
    assert isinstance(engine, StreamedEngine)
    received = await _send(trainer, engine, way)
    if not received.num_confirmed:
        emit(Notice(f"no checksum confirms weights {received.version}: the engine states none"))
    elif is_first and received.num_confirmed < received.num_parameters:
        share = f"{received.num_confirmed} of {received.num_parameters}"
        emit(Notice(f"checksums confirm {share} parameters that the engine holds"))
    return received.version


async def _send(trainer: Trainer, engine: StreamedEngine, way: str) -> Received:
    """Send all weights; if every server was lost in it, send again once one answers."""
    for attempt in range(_TRIES):
        try:
            async with engine.update() as update:
                return await update.finish(await trainer.send(update.targets, way))
        except EngineLostError:
            if attempt + 1 == _TRIES:
                raise
    raise AssertionError


@asynccontextmanager
async def resending(
    trainer: Trainer, engine: Engine, cluster: ClusterSection
) -> AsyncIterator[None]:
    """While the block runs, send the serving weights to servers that restart without them."""
    way = choose_way(cluster, engine, ignore)
    if way == "disk" or not isinstance(engine, StreamedEngine):
        yield
        return
    task = asyncio.create_task(_resend(trainer, engine, way))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _resend(trainer: Trainer, engine: StreamedEngine, way: str) -> None:
    while True:
        await engine.await_missed()
        # A failed attempt leaves the servers out of use until the next one, or the next update.
        with suppress(EngineError, TrainerError):
            async with engine.update(missed=True) as update:
                sent = await trainer.send(update.targets, way, version=update.version)
                await update.finish(sent)
