"""Sandbox servers on the nodes of a run: one a machine, started again when it dies.

Each is `sandboxes/e2b_server/process.py` over the recipe's own backend, with a key of its own. The
E2B client calls it. Its link ends it when the controller is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerl.cluster.node import PYTHON, Node, Order, Running, end_server, last_lines
from swerl.core.contracts import Sandbox
from swerl.core.errors import ClusterError, SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.events import Emit, Notice
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.recipe.schema import Recipe
from swerl.sandboxes import e2b
from swerl.sandboxes._e2b.sandbox import E2BSandbox
from swerl.sandboxes.e2b import E2BBackend
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


class Site:
    """One machine's sandboxes."""

    def __init__(self, name: str, changed: asyncio.Event) -> None:
        """`changed` is set when a server stands here, or none will any more."""
        self.name = name
        self.num_open = 0
        """Sandboxes of this run there, those being opened and closed with them."""
        self.backend: E2BBackend | None = None
        """None while nothing serves there."""
        self.is_over = False
        """Whether nothing will serve there any more."""
        self._changed = changed
        self._open: set[E2BSandbox] = set()
        self._lost: asyncio.Future[SandboxLostError]

    def serve(self, backend: E2BBackend) -> None:
        """Open what comes from now on by this backend."""
        self.backend = backend
        self._lost = asyncio.get_running_loop().create_future()
        self._changed.set()

    def lose(self, why: str, *, for_good: bool = False) -> None:
        """Fail everything in its sandboxes, and open none until another server stands, if ever."""
        self.backend, self.is_over = None, for_good
        self._changed.set()
        message = f"the sandbox server on {self.name} ended: {why}"
        error = SandboxLostError(message, hint="its log is with the run's other logs")
        if not self._lost.done():
            self._lost.set_result(error)
        for sandbox in list(self._open):
            sandbox.lose(error)

    @asynccontextmanager
    async def opened(
        self, image: str, limits: Limits, *, workdir: str, mounts: Sequence[Mount], name: str
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox here. Raises SandboxLostError where the server ends meanwhile."""
        assert self.backend is not None
        lost = self._lost
        context = self.backend.open(image, limits, workdir=workdir, mounts=mounts, name=name)
        self.num_open += 1
        try:
            sandbox = await _entered(context, lost)
            self._open.add(sandbox)
            if lost.done():
                sandbox.lose(lost.result())
            try:
                yield sandbox
            finally:
                try:
                    await context.__aexit__(None, None, None)
                except SandboxError:
                    if not lost.done():
                        raise
                finally:
                    self._open.discard(sandbox)
        finally:
            self.num_open -= 1


class Spread:
    """Implements SandboxBackend over sites."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = asyncio.Event()
        self.sites = [Site(name, self._changed) for name in names]

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image` on the machine with the fewest.

        Waits where none serves. Raises SandboxUnavailableError where none ever will.
        """
        return self._open(image, limits, workdir, mounts, name)

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the sandboxes that the machines' servers hold."""
        backends = [site.backend for site in self.sites if site.backend]
        found = await asyncio.gather(*(backend.live() for backend in backends))
        return [each for some in found for each in some]

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name; nothing where none is."""
        backends = [site.backend for site in self.sites if site.backend]
        await asyncio.gather(*(backend.remove(name) for backend in backends))

    def price(self, limits: Limits) -> float:
        """Return 0: these machines are paid for."""
        return 0.0

    @asynccontextmanager
    async def _open(
        self, image: str, limits: Limits, workdir: str, mounts: Sequence[Mount], name: str
    ) -> AsyncIterator[Sandbox]:
        site = await self._emptiest()
        async with site.opened(image, limits, workdir=workdir, mounts=mounts, name=name) as sandbox:
            yield sandbox

    async def _emptiest(self) -> Site:
        while not (serving := [site for site in self.sites if site.backend]):
            if all(site.is_over for site in self.sites):
                message = "no machine of the cluster serves sandboxes any more"
                hint = "the logs sandboxes-*.log of the run say why; the same command goes on"
                raise SandboxUnavailableError(message, hint=hint)
            self._changed.clear()
            await self._changed.wait()
        return min(serving, key=lambda site: site.num_open)


async def _entered(
    context: AbstractAsyncContextManager[E2BSandbox], lost: asyncio.Future[SandboxLostError]
) -> E2BSandbox:
    """Return the open sandbox. Raises SandboxLostError as soon as its server has ended."""
    entering = asyncio.ensure_future(context.__aenter__())
    either: set[asyncio.Future[Any]] = {entering, lost}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            raise lost.result()
        return entering.result()
    finally:
        if not entering.done():
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
