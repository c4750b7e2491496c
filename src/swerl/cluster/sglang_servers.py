"""SGLang servers on the nodes of a run: started, waited for, and started again when they die.

Only the processes are looked after here. Whoever talks to them by URL (`engines/sglang.py`) gives a
server that came back the weights that serve before it uses it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.cluster.network import free_port
from swerl.cluster.node import Node, Order, Running
from swerl.engines import sglang
from swerl.engines._sglang_launch import serves
from swerl.errors import ClusterError, EngineError, RecipeError
from swerl.recipe.schema import ClusterSection
from swerl.run.events import Emit, Notice

POLL_S = 0.5
END_S = 30.0
"""Seconds for a server to end by itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one server runs."""

    node: Node
    url: str
    order: Order


@asynccontextmanager
async def serve_on(
    nodes: Sequence[Node],
    options: sglang.Options,
    model: Path,
    *,
    cluster: ClusterSection,
    logs: Path,
    emit: Emit,
) -> AsyncIterator[list[str]]:
    """Yield the URLs of servers on these nodes, once all of them serve.

    Raises RecipeError on an engine larger than a node, EngineError where one does not come up.
    """
    places = [
        await _place(node, number, options, model, cluster=cluster, logs=logs)
        for node in nodes
        for number in range(engines_per_node(cluster))
    ]
    running: list[Running] = []
    keepers: list[asyncio.Task[None]] = []
    try:
        for place in places:
            running.append(await place.node.start(place.order))
        await asyncio.gather(
            *(
                _until_up(place, process, options.start_timeout_s)
                for place, process in zip(places, running, strict=True)
            )
        )
        keepers = [
            asyncio.create_task(_keep(running, index, place, options, emit))
            for index, place in enumerate(places)
        ]
        yield [place.url for place in places]
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(_end(process) for process in running))


def engines_per_node(cluster: ClusterSection) -> int:
    """Return how many servers a node holds. Raises RecipeError where one does not fit."""
    if not cluster.gpus_per_node:
        return 1
    count = cluster.gpus_per_node // cluster.gpus_per_engine
    if not count:
        message = f"cluster.gpus_per_engine = {cluster.gpus_per_engine} is more than a node has"
        hint = "swerl starts engines of one node at most; start larger ones and set engine.url"
        raise RecipeError(message, hint=hint)
    return count


async def _place(
    node: Node,
    number: int,
    options: sglang.Options,
    model: Path,
    *,
    cluster: ClusterSection,
    logs: Path,
) -> Place:
    port = await node.call(free_port, node.address)
    command = sglang.server_command(options, model, host=node.address, port=port)
    env = sglang.environment(options)
    if cluster.gpus_per_node:
        size = cluster.gpus_per_engine
        env["CUDA_VISIBLE_DEVICES"] = ",".join(node.gpus[number * size : (number + 1) * size])
        command.append(f"--tp-size={size}")
        if cluster.colocate:
            command.append("--enable-memory-saver")  # its memory is the trainer's in turn
    log = (logs / f"engine-{node.name}-{number}.log").resolve()
    return Place(
        node,
        f"http://{node.address}:{port}",
        Order(tuple(command), log, env=env, guarded=True),
    )


async def _until_up(place: Place, process: Running, timeout_s: float) -> None:
    """Wait until a server serves. Raises EngineError with its log's end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not process.ended.done():
                if await serves(place.url):
                    return
                await asyncio.wait([process.ended], timeout=POLL_S)
    log = place.order.log
    how = process.ended.result() if process.ended.done() else f"not up after {timeout_s:g} s"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = "; ".join(line.strip() for line in lines[-3:])
    message = f"the engine on {place.node.name} did not come up ({how}): {last}"
    raise EngineError(message, hint=f"its whole log is {log}")


async def _keep(
    running: list[Running], index: int, place: Place, options: sglang.Options, emit: Emit
) -> None:
    """Start a server again when it ends, a few times; then leave it to those who are left."""
    for number in range(1, options.restarts + 1):
        how = await asyncio.shield(running[index].ended)
        emit(
            Notice(
                f"the engine at {place.url} ended ({how}); it is started again "
                f"({number} of {options.restarts})"
            )
        )
        try:
            running[index] = await place.node.start(place.order)
        except ClusterError as error:
            emit(Notice(f"the engine at {place.url} is lost: {error}"))
            return


async def _end(process: Running) -> None:
    """Ask a server to end, and kill it where it does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.ended.done():
            return
        await process.signal(number)
        await asyncio.wait([process.ended], timeout=END_S)
