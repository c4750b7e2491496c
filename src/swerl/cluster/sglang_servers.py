"""SGLang servers on the nodes of a run: start them, wait until they serve, end them.

`supervise` in `engines/_sglang_server.py` restarts a server that ends or hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from swerl.cluster.checks import gpu_uuids
from swerl.cluster.node import Node, ProcessSpec, RunningProcess, end_server, last_lines
from swerl.core.errors import EngineError, RecipeError
from swerl.engines import sglang
from swerl.engines._process import free_port, serves
from swerl.engines._serving import environment
from swerl.recipe.schema import ClusterSection

POLL_S = 0.5


class NodeServer:
    """One server on a node. Implements `Host` of the engines' launcher."""

    def __init__(
        self,
        node: Node,
        url: str,
        spec: ProcessSpec,
        start_timeout_s: float,
        gpus: tuple[str, ...] = (),
    ) -> None:
        """`gpus` are the uuids of its GPUs; empty if unknown."""
        self.url = url
        self.gpus = gpus
        self.node = node
        self.spec = spec
        self._start_timeout_s = start_timeout_s
        self._process: RunningProcess | None = None

    async def start(self) -> None:
        """Start it and wait until it serves. Raises ClusterError, EngineError."""
        await self.stop()
        await self.begin()
        await self.until_up()

    async def begin(self) -> None:
        """Start its process. Raises ClusterError."""
        spec = self.spec
        if self._process is not None:
            spec = replace(spec, argv=(*spec.argv, *sglang.AGAIN))
        self._process = await self.node.start(spec)

    async def until_up(self) -> None:
        """Wait until it serves. Raises EngineError with the end of its log."""
        process = self._process
        assert process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._start_timeout_s):
                while not process.ended.done():
                    if await serves(self.url):
                        return
                    await asyncio.wait([process.ended], timeout=POLL_S)
        log = self.spec.log
        late = f"not up after {self._start_timeout_s:g} s"
        how = process.ended.result() if process.ended.done() else late
        raise EngineError(
            f"the engine on {self.node.name} did not come up ({how}): {last_lines(log)}",
            hint=f"the whole log is {log}",
        )

    async def stop(self) -> None:
        await end_server(self._process)

    async def ended(self) -> str:
        """Wait for its end and return the reason."""
        assert self._process is not None
        return f"its process ended: {await asyncio.shield(self._process.ended)}"


@asynccontextmanager
async def serve_on(
    nodes: Sequence[Node],
    options: sglang.Options,
    model: Path,
    *,
    cluster: ClusterSection,
    logs: Path,
    flags: Sequence[str] = (),
) -> AsyncIterator[list[NodeServer]]:
    """Yield servers on these nodes, once all of them serve; `flags` go before those of `options`.

    Raises RecipeError on an engine larger than a node, EngineError if one does not come up.
    """
    servers = await node_servers(nodes, options, model, cluster=cluster, logs=logs, flags=flags)
    try:
        # All begin before the first wait, so that they load their weights at the same time.
        for server in servers:
            await server.begin()
        await asyncio.gather(*(server.until_up() for server in servers))
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def node_servers(
    nodes: Sequence[Node],
    options: sglang.Options,
    model: Path,
    *,
    cluster: ClusterSection,
    logs: Path,
    flags: Sequence[str] = (),
) -> list[NodeServer]:
    """Return the servers of these nodes, not started: one for each group of GPUs."""
    return [
        await _server(node, number, options, model, cluster=cluster, logs=logs, flags=tuple(flags))
        for node in nodes
        for number in range(engines_of(node, cluster))
    ]


def engines_of(node: Node, cluster: ClusterSection) -> int:
    """Return the number of servers of a node. Raises RecipeError if none fits."""
    if not cluster.gpus_per_node:
        return 1
    count = len(node.gpus) // cluster.gpus_per_engine
    if not count:
        message = f"cluster.gpus_per_engine = {cluster.gpus_per_engine} exceeds a node's GPUs"
        hint = "swerl starts engines of one node at most; start larger ones and set engine.url"
        raise RecipeError(message, hint=hint)
    return count


async def _server(
    node: Node,
    number: int,
    options: sglang.Options,
    model: Path,
    *,
    cluster: ClusterSection,
    logs: Path,
    flags: tuple[str, ...],
) -> NodeServer:
    port = await node.call(free_port, node.address)
    size = cluster.gpus_per_engine if cluster.gpus_per_node else 0
    gpus = node.gpus[number * size : (number + 1) * size]
    launch = options.model_copy(update={"flags": (*flags, *options.flags)})
    # The saver costs memory, and only a trainer on the same GPUs uses it.
    saver = cluster.colocate and size > 0
    command = sglang.server_command(
        launch, model, host=node.address, port=port, num_gpus=size, saver=saver
    )
    # A run without GPUs must not take those that the machine has.
    env = environment(gpus) or {"CUDA_VISIBLE_DEVICES": ""}
    log = (logs / f"engine-{node.name}-{number}.log").resolve()
    spec = ProcessSpec(tuple(command), log, env=env, guarded=True)
    uuids = await node.call(gpu_uuids, gpus)
    url = f"http://{node.address}:{port}"
    return NodeServer(node, url, spec, options.start_timeout_s, uuids)
