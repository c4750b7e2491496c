"""Open the nodes of a recipe: this machine, an existing Ray cluster, or a new one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swerl.cluster.hosts import HostPlan, host_cluster, slurm_hosts
from swerl.cluster.node import LocalNode, Node
from swerl.cluster.ray_nodes import RayShare, ray_nodes
from swerl.core.errors import RecipeError
from swerl.recipe.schema import ClusterSection, Recipe


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run. Colocated engines and trainer have the same list."""

    trainer: tuple[Node, ...]
    engines: tuple[Node, ...]

    @property
    def all(self) -> tuple[Node, ...]:
        """Every machine once."""
        return tuple(dict.fromkeys((*self.trainer, *self.engines)))


@asynccontextmanager
async def open_nodes(
    recipe: Recipe, logs: Path, *, notify: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Nodes]:
    """Reserve the machines of a run until the block ends; `notify` receives waiting notices.

    Raises RecipeError if the recipe's numbers do not fit together, ClusterError if machines fail.
    """
    # Wrong numbers must fail before any machine is reserved.
    num_trainer = trainer_nodes(recipe)
    cluster = recipe.cluster
    if cluster.launcher == "local":
        here = (LocalNode(),)
        yield Nodes(here, here)
        return
    async with AsyncExitStack() as stack:
        address = cluster.ray_address
        if cluster.launcher != "ray":
            plan = _host_plan(recipe, logs)
            address = await stack.enter_async_context(host_cluster(plan))
        share = RayShare(cluster.nodes, cluster.gpus_per_node, cpus_per_node(recipe))
        held = ray_nodes(address, share, run=recipe.name, notify=notify)
        nodes = await stack.enter_async_context(held)
        trainer = tuple(nodes[:num_trainer])
        yield Nodes(trainer, trainer if cluster.colocate else tuple(nodes[num_trainer:]))


def trainer_nodes(recipe: Recipe) -> int:
    """Return the number of machines with ranks. Raises RecipeError if ranks spread unevenly."""
    cluster, ranks = recipe.cluster, recipe.trainer.ranks
    if cluster.launcher == "local":
        if cluster.nodes > 1:
            raise RecipeError(
                f"cluster.nodes = {cluster.nodes} with cluster.launcher = 'local'",
                hint="set cluster.launcher to ray, ssh or slurm",
            )
        return 1
    # Only with GPUs and without colocation do the engines have machines of their own.
    apart = bool(cluster.gpus_per_node) and not cluster.colocate
    num_nodes = -(-ranks // cluster.gpus_per_node) if apart else cluster.nodes
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
    threads = max(1, recipe.trainer.ranks // cluster.nodes) * recipe.trainer.threads
    return threads + cluster.sandbox_cpus


def _host_plan(recipe: Recipe, logs: Path) -> HostPlan:
    cluster: ClusterSection = recipe.cluster
    hosts, command = cluster.hosts, cluster.ssh
    if cluster.launcher == "slurm":
        hosts, command = slurm_hosts(cluster.gpus_per_node)
    if len(hosts) != cluster.nodes:
        message = f"cluster.nodes = {cluster.nodes}, but there are {len(hosts)} hosts"
        source = "the allocation" if cluster.launcher == "slurm" else "cluster.hosts"
        raise RecipeError(message, hint=f"make both the same: {source} holds {', '.join(hosts)}")
    return HostPlan(
        hosts=hosts,
        command=command,
        logs=logs,
        gpus_per_node=cluster.gpus_per_node,
        cpus_per_node=cpus_per_node(recipe),
        head_address=cluster.head_address,
    )
