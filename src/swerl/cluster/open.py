"""Open the nodes of a recipe: this machine, or machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swerl.cluster.node import LocalNode, Node, NodePart
from swerl.cluster.ray_nodes import RayShare, ray_nodes
from swerl.core.errors import RecipeError
from swerl.core.secrets import secret, visible_gpus
from swerl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run. Colocated engines and trainer have the same list."""

    trainer: tuple[Node, ...]
    engines: tuple[Node, ...]

    @property
    def all(self) -> tuple[Node, ...]:
        """Every machine once, with all of its GPUs."""
        nodes = (*self.trainer, *self.engines)
        whole = (node.whole if isinstance(node, NodePart) else node for node in nodes)
        return tuple(dict.fromkeys(whole))


@asynccontextmanager
async def open_nodes(
    recipe: Recipe, *, notify: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Nodes]:
    """Reserve the machines of a run until the block ends; `notify` receives waiting notices.

    Raises RecipeError if the recipe's numbers do not fit together, ClusterError if machines fail.
    """
    # Wrong numbers must fail before any machine is reserved.
    trainer_nodes(recipe)
    cluster = recipe.cluster
    if cluster.launcher == "local":
        yield place(recipe, [LocalNode(gpus=_gpus_here(cluster.gpus_per_node))])
        return
    address = secret("RAY_ADDRESS") or "auto"
    share = RayShare(cluster.nodes, cluster.gpus_per_node, cpus_per_node(recipe))
    reserved = ray_nodes(address, share, run=recipe.name, notify=notify)
    async with reserved as machines:
        yield place(recipe, machines)


def place(recipe: Recipe, machines: Sequence[Node]) -> Nodes:
    """Return the machines of ranks and of engines; one machine may be split by its GPUs."""
    num_trainer, ranks = trainer_nodes(recipe), recipe.trainer.ranks
    trainer = tuple(machines[:num_trainer])
    if not _apart(recipe):
        return Nodes(trainer, trainer)
    if len(machines) > 1:
        return Nodes(trainer, tuple(machines[num_trainer:]))
    (only,) = machines
    first, rest = NodePart(only, only.gpus[:ranks]), NodePart(only, only.gpus[ranks:])
    return Nodes((first,), (rest,))


def _gpus_here(count: int) -> tuple[str, ...]:
    """Return the first GPUs of this machine that CUDA shows. Raises RecipeError on too few."""
    shown = visible_gpus()
    if shown is None:
        return tuple(map(str, range(count)))
    if len(shown) < count:
        raise RecipeError(
            f"cluster.gpus_per_node = {count}, but CUDA_VISIBLE_DEVICES shows {len(shown)}",
            hint="unset the variable, or lower cluster.gpus_per_node and trainer.ranks",
        )
    return shown[:count]


def _apart(recipe: Recipe) -> bool:
    """Return whether engines have GPUs of their own."""
    return bool(recipe.cluster.gpus_per_node) and not recipe.cluster.colocate


def trainer_nodes(recipe: Recipe) -> int:
    """Return the number of machines with ranks. Raises RecipeError if ranks spread unevenly."""
    cluster, ranks = recipe.cluster, recipe.trainer.ranks
    if cluster.launcher == "local":
        if cluster.nodes > 1:
            raise RecipeError(
                f"cluster.nodes = {cluster.nodes} with cluster.launcher = 'local'",
                hint="set cluster.launcher = 'ray'",
            )
        return 1
    apart = _apart(recipe) and cluster.nodes > 1
    num_nodes = -(-ranks // cluster.gpus_per_node) if apart else cluster.nodes
    if apart and ranks % cluster.gpus_per_node:
        raise RecipeError(
            f"trainer.ranks = {ranks} does not fill whole nodes of {cluster.gpus_per_node} GPUs",
            hint="with cluster.colocate = false several nodes are split node by node",
        )
    if ranks % num_nodes:
        raise RecipeError(
            f"trainer.ranks = {ranks} does not spread evenly over {num_nodes} nodes",
            hint="change trainer.ranks or cluster.nodes",
        )
    if (ranks // num_nodes) % recipe.trainer.tensor_parallel:
        message = f"{ranks // num_nodes} ranks a node would split a tensor group over nodes"
        hint = (
            f"give a node a multiple of trainer.tensor_parallel = {recipe.trainer.tensor_parallel}"
        )
        raise RecipeError(message, hint=hint)
    return num_nodes


def cpus_per_node(recipe: Recipe) -> int:
    """Return the cores that a node needs for GPU processes (or CPU threads) and for sandboxes."""
    cluster = recipe.cluster
    if cluster.gpus_per_node:
        return cluster.gpus_per_node + cluster.sandbox_cpus
    threads = max(1, recipe.trainer.ranks // cluster.nodes)
    return threads + cluster.sandbox_cpus
