"""Sandbox servers on the nodes of a run: one a machine, started again when it dies.

Each is `sandboxes/e2b_server/process.py` over the recipe's own backend, with a key of its own. The
E2B client calls it. Its link ends it when the controller is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swerl.cluster.node import PYTHON, Node, Order, Running
from swerl.cluster.sandbox_spread import Site, Spread
from swerl.cluster.servers import end_server, last_lines
from swerl.core.errors import ClusterError, SandboxError
from swerl.core.events import Emit, Notice
from swerl.recipe.schema import Recipe
from swerl.sandboxes import e2b
from swerl.sandboxes.e2b_server.access import new_key
from swerl.sandboxes.e2b_server.process import Begin

RESTARTS = 3
"""Times that a machine's server is started again; then the others do without it."""
START_S = 120.0
"""Seconds for a server to listen: what a killed start left on its machine is removed first."""
CREATES_PER_S = 1000.0
REQUEST_S = 300.0
"""Seconds of one request: a machine may have to pull the sandbox's image first."""
SPARE = 2
"""Sandboxes that a server may hold for each Episode: one may close while the next opens."""


@asynccontextmanager
async def serve_sandboxes(
    nodes: Sequence[Node], recipe: Recipe, *, logs: Path, emit: Emit
) -> AsyncIterator[Spread]:
    """Yield a backend whose sandboxes are spread over these nodes.

    Raises SandboxError where a machine cannot serve any.
    """
    spread = Spread([node.name for node in nodes])
    servers = [
        _Server(node, site, recipe, logs=logs, emit=emit)
        for node, site in zip(nodes, spread.sites, strict=True)
    ]
    keepers: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(server.start() for server in servers))
        keepers = [asyncio.create_task(server.keep()) for server in servers]
        yield spread
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(server.end() for server in servers))


@dataclass(frozen=True, slots=True)
class _Up:
    """A server that listens."""

    url: str
    key: str


class _Server:
    """One machine's server."""

    def __init__(self, node: Node, site: Site, recipe: Recipe, *, logs: Path, emit: Emit) -> None:
        self._node = node
        self._site = site
        self._recipe = recipe
        self._log = (logs / f"sandboxes-{node.name}.log").resolve()
        self._emit = emit
        self._process: Running | None = None

    async def start(self) -> None:
        """Start it and let the site use it. Raises SandboxError with what it said."""
        order = Order(
            (PYTHON, "-m", "swerl.sandboxes.e2b_server.process"),
            self._log,
            linked=True,
            guarded=True,
        )
        self._process = await self._node.start(order)
        try:
            async with asyncio.timeout(START_S):
                up = await self._begin(self._process)
        except (TimeoutError, ConnectionError) as error:
            raise self._failed(f"it does not answer ({type(error).__name__})") from error
        self._site.serve(_client(up, self._recipe))

    async def keep(self) -> None:
        """Start it again when it ends, a few times; then leave it to the others."""
        for left in reversed(range(RESTARTS)):
            assert self._process is not None
            how = await asyncio.shield(self._process.ended)
            self._site.lose(str(how))
            self._emit(
                Notice(
                    f"the sandbox server on {self._node.name} ended ({how}), and its sandboxes "
                    f"with it; it is started again, {left} more times"
                )
            )
            try:
                await self.start()
            except (ClusterError, SandboxError) as error:
                self._lost(str(error))
                return
        assert self._process is not None
        self._lost(str(await asyncio.shield(self._process.ended)))

    async def end(self) -> None:
        """Ask it to remove its sandboxes and end, and kill it where it does not."""
        await end_server(self._process)

    async def _begin(self, process: Running) -> _Up:
        recipe, key = self._recipe, new_key()
        begin = Begin(
            key=key,
            run=recipe.name,
            sandbox=recipe.sandbox.model_dump(mode="json"),
            host=self._node.address,
            max_sandboxes=SPARE * recipe.rollout.concurrency,
        )
        await process.send(begin.line())
        answer = await process.receive()
        if not answer:
            raise self._failed(str(await asyncio.shield(process.ended)))
        told = json.loads(answer)
        if "error" in told:
            raise SandboxError(
                f"no sandboxes on {self._node.name}: {told['error']}", hint=told["hint"]
            )
        return _Up(told["url"], key)

    def _failed(self, why: str) -> SandboxError:
        last = last_lines(self._log)
        message = f"the sandbox server on {self._node.name} did not come up: {why}: {last}"
        return SandboxError(message, hint=f"its whole log is {self._log}")

    def _lost(self, why: str) -> None:
        self._site.lose(why, for_good=True)
        self._emit(Notice(f"{self._node.name} serves no sandboxes any more: {why}"))


def _client(up: _Up, recipe: Recipe) -> e2b.E2BBackend:
    options = e2b.Options(
        api_url=up.url,
        sandbox_url=up.url,
        image_key="image",
        create_concurrency=recipe.rollout.concurrency,
        creates_per_s=CREATES_PER_S,
        request_timeout_s=REQUEST_S,
        boot_timeout_s=max(REQUEST_S, recipe.budgets.agent_s),
        price_per_hour=0.0,
    )
    return e2b.connect(options, up.key, own=True)
