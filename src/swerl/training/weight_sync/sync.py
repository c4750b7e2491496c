"""Bring the trainer's weights into the engine, between learning and sampling.

There are three ways, the fastest first: `tensor` shares memory between trainer and engine,
`distributed` broadcasts, `disk` writes a folder. After each of them, either all of the weights
serve or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swerl.core.contracts import ColocatedEngine, Engine, StreamedEngine, Trainer
from swerl.core.errors import RecipeError
from swerl.core.events import Emit, Notice, ignore
from swerl.core.learning import EngineTarget, Sent
from swerl.recipe.schema import ClusterSection

if TYPE_CHECKING:
    from swerl.training.trainer import MegatronTrainer


@dataclass(frozen=True, slots=True)
class TrainerSource:
    """Implements WeightSource by one of the trainer's ways."""

    trainer: MegatronTrainer
    way: str

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        return await self.trainer.send(targets, self.way, version=version)


def choose_way(cluster: ClusterSection, engine: Engine, emit: Emit) -> str:
    """Return the recipe's way of sending weights. Raises RecipeError if the engine lacks it.

    A Notice is emitted if `auto` falls back to the disk although there are GPUs.
    """
    streams = isinstance(engine, StreamedEngine) and getattr(engine, "streams", True)
    if streams and shares_gpus(cluster) and getattr(engine, "takes_adapters", False):
        raise RecipeError(
            "an engine on the trainer's GPUs drops the weights that adapters change",
            hint="set engine.adapter_rank = 0, or cluster.colocate = false",
        )
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
    if isinstance(engine, ColocatedEngine):
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
    # An engine that cannot take adapters by themselves gets the weights they are merged into.
    adapters = getattr(trainer, "has_adapters", False) and getattr(engine, "takes_adapters", False)
    if way == "disk" or adapters:
        return await engine.load(await trainer.publish(adapters=adapters))
    assert isinstance(engine, StreamedEngine)
    received = await engine.receive(TrainerSource(trainer, way))  # type: ignore[arg-type]
    if not received.num_confirmed:
        emit(Notice(f"no checksum confirms weights {received.version}: the engine states none"))
    elif is_first and received.num_confirmed < received.num_parameters:
        share = f"{received.num_confirmed} of {received.num_parameters}"
        emit(Notice(f"checksums confirm {share} parameters that the engine holds"))
    return received.version
