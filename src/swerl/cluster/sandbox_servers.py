"""Sandboxes on the nodes of a run: one server per machine, and a backend over all of them.

Each server is `sandboxes/e2b_server/process.py` over the recipe's own backend, with a key of its
own; the E2B client calls it. It ends with its link when the controller is gone. A server that dies
fails its open sandboxes at once and is restarted, as is one that does not answer; new sandboxes go
to the emptiest machine.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerl.cluster.node import (
    PYTHON,
    Node,
    ProcessEnd,
    ProcessSpec,
    RunningProcess,
    end_server,
    last_lines,
)
from swerl.core.contracts import Sandbox
from swerl.core.errors import (
    ClusterError,
    SandboxError,
    SandboxLostError,
    SandboxUnavailableError,
    SwerlError,
)
from swerl.core.events import Emit, Notice
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.recipe.schema import Recipe
from swerl.sandboxes import e2b
from swerl.sandboxes._e2b.sandbox import E2BSandbox
from swerl.sandboxes.e2b import E2BBackend
from swerl.sandboxes.e2b_server.access import new_key
from swerl.sandboxes.e2b_server.process import ServeRequest

RESTARTS = 3
"""Restarts of a machine's server; afterwards the run continues without it."""
START_S = 120.0
"""Seconds for a server to listen: it first removes the sandboxes of a killed start."""
ASK_S, SILENT_S = 5.0, 30.0
"""A server is asked for its sandboxes every 5 s, and must answer within 30 s: while it is silent
the time of its Episodes passes."""
CREATES_PER_S = 1000.0
REQUEST_S = 300.0
"""Time limit of one request: a machine may have to pull the sandbox's image first."""
SPARE = 2
"""Sandboxes that a server may hold per Episode: one may close while the next opens."""


@asynccontextmanager
async def serve_sandboxes(
    nodes: Sequence[Node], recipe: Recipe, *, logs: Path, emit: Emit
) -> AsyncIterator[SpreadBackend]:
    """Yield a backend whose sandboxes are spread over these nodes.

    Raises SandboxError if a machine cannot serve any.
    """
    backend = SpreadBackend([node.name for node in nodes])
    servers = [
        _Server(node, site, recipe, logs=logs, emit=emit)
        for node, site in zip(nodes, backend.sites, strict=True)
    ]
    supervisors: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(server.start() for server in servers))
        supervisors = [asyncio.create_task(server.supervise()) for server in servers]
        yield backend
    finally:
        # The supervisors stop first: they would restart the servers that end below.
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
        await asyncio.gather(*(server.end() for server in servers))


@dataclass(frozen=True, slots=True)
class _Up:
    url: str
    key: str
    fingerprint: str = ""
    """Of its certificate; empty: plain HTTP."""


class _Server:
    def __init__(
        self, node: Node, site: SandboxSite, recipe: Recipe, *, logs: Path, emit: Emit
    ) -> None:
        self._node = node
        self._site = site
        self._recipe = recipe
        self._log = (logs / f"sandboxes-{node.name}.log").resolve()
        self._emit = emit
        self._process: RunningProcess | None = None

    async def start(self) -> None:
        """Start the server and connect the site to it. Raises SandboxError with its message."""
        spec = ProcessSpec(
            (PYTHON, "-m", "swerl.sandboxes.e2b_server.process"),
            self._log,
            linked=True,
            guarded=True,
        )
        self._process = await self._node.start(spec)
        try:
            async with asyncio.timeout(START_S):
                up = await self._begin(self._process)
        except (TimeoutError, ConnectionError) as error:
            raise self._failed(f"it does not answer ({type(error).__name__})") from error
        self._site.serve(_client(up, self._recipe))

    async def supervise(self) -> None:
        """Restart the server when it ends, up to RESTARTS times."""
        for left in reversed(range(RESTARTS)):
            how = await self._ended()
            self._site.lose(str(how))
            self._emit(
                Notice(
                    f"the sandbox server on {self._node.name} ended ({how}) with its sandboxes; "
                    f"restarting it, {left} restarts left"
                )
            )
            try:
                await self.start()
            except (ClusterError, SandboxError) as error:
                self._lost(str(error))
                return
        self._lost(str(await self._ended()))

    async def _ended(self) -> ProcessEnd:
        """Wait for the server's end; kill it if it is silent, such as one that is stopped."""
        process, backend = self._process, self._site.backend
        assert process is not None and backend is not None
        ended = process.ended
        while not (await asyncio.wait([ended], timeout=ASK_S))[0]:
            try:
                async with asyncio.timeout(SILENT_S):
                    await backend.live()
            except TimeoutError:
                await process.signal(signal.SIGKILL)
            except SwerlError:
                pass  # it has just ended, or refuses: it answers
        return ended.result()

    async def end(self) -> None:
        """Ask the server to remove its sandboxes and end; kill it if it does not."""
        await end_server(self._process)

    async def _begin(self, process: RunningProcess) -> _Up:
        recipe, key = self._recipe, new_key()
        begin = ServeRequest(
            key=key,
            run=recipe.name,
            sandbox=recipe.sandbox.model_dump(mode="json"),
            host=self._node.address,
            max_sandboxes=SPARE * recipe.rollout.concurrency,
            has_tls=recipe.cluster.sandbox_tls and self._node.address != "127.0.0.1",
        )
        await process.send(begin.line())
        answer = await process.receive()
        if not answer:
            raise self._failed(str(await asyncio.shield(process.ended)))
        reply = json.loads(answer)
        if "error" in reply:
            raise SandboxError(
                f"no sandboxes on {self._node.name}: {reply['error']}", hint=reply["hint"]
            )
        return _Up(reply["url"], key, reply.get("fingerprint", ""))

    def _failed(self, why: str) -> SandboxError:
        last = last_lines(self._log)
        message = f"the sandbox server on {self._node.name} did not come up: {why}: {last}"
        return SandboxError(message, hint=f"the whole log is {self._log}")

    def _lost(self, why: str) -> None:
        self._site.lose(why, for_good=True)
        self._emit(Notice(f"{self._node.name} no longer serves sandboxes: {why}"))


def _client(up: _Up, recipe: Recipe) -> e2b.E2BBackend:
    options = e2b.Options(
        api_url=up.url,
        sandbox_url=up.url,
        fingerprint=up.fingerprint,
        image_key="image",
        create_concurrency=recipe.rollout.concurrency,
        creates_per_s=CREATES_PER_S,
        request_timeout_s=REQUEST_S,
        boot_timeout_s=max(REQUEST_S, recipe.budgets.agent_s),
        price_per_hour=0.0,
    )
    return e2b.connect(options, up.key, own=True)


class SandboxSite:
    """The backend of one machine; its snapshots outlive its server."""

    def __init__(self, name: str, changed: asyncio.Event) -> None:
        """`changed` is set when a server is up here, or none ever will be."""
        self.name = name
        self.num_open = 0
        """Sandboxes of this run there, including those being opened or closed."""
        self.backend: E2BBackend | None = None
        """None while no server is up."""
        self.is_over = False
        """True when no server will be up again."""
        self._changed = changed
        self._open: set[E2BSandbox] = set()
        self._lost: asyncio.Future[SandboxLostError]

    def serve(self, backend: E2BBackend) -> None:
        """Open further sandboxes with this backend."""
        self.backend = backend
        # Each server has a future of its own, so a restart does not revive lost sandboxes.
        self._lost = asyncio.get_running_loop().create_future()
        self._changed.set()

    def lose(self, why: str, *, for_good: bool = False) -> None:
        """Fail everything in its sandboxes, and open none until another server is up."""
        self.backend, self.is_over = None, for_good
        self._changed.set()
        message = f"the sandbox server on {self.name} ended: {why}"
        error = SandboxLostError(message, hint="its log is with the run's other logs")
        if not self._lost.done():
            self._lost.set_result(error)
        for sandbox in list(self._open):
            sandbox.lose(error)

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox here. Raises SandboxLostError if the server ends, or ended just now."""
        # A restart replaces the future, but this sandbox belongs to the present server.
        lost = self._lost
        if self.backend is None:
            raise lost.result()
        context = self.backend.open(image, limits, workdir=workdir, mounts=mounts, name=name)
        sandbox = await _entered(context, lost)
        self._open.add(sandbox)
        # The server may have ended before the sandbox was in the set.
        if lost.done():
            sandbox.lose(lost.result())
        try:
            yield sandbox
        finally:
            try:
                await context.__aexit__(None, None, None)
            except SandboxError:
                # A server that is gone has no sandbox left to close.
                if not lost.done():
                    raise
            finally:
                self._open.discard(sandbox)

    async def live(self) -> Sequence[LiveSandbox]:
        return await self.backend.live() if self.backend else ()

    async def remove(self, name: str) -> None:
        if self.backend:
            await self.backend.remove(name)

    def price(self, limits: Limits) -> float:
        """Return 0: the machine is already paid for."""
        return 0.0

    async def identify(self, image: str) -> str:
        return await self.backend.identify(image) if self.backend else ""

    async def find_snapshot(self, name: str) -> str:
        """Return the reference of a snapshot on this machine; a restarted server finds it, too."""
        return await self.backend.find_snapshot(name) if self.backend else ""

    async def drop_snapshot(self, name: str) -> None:
        if self.backend:
            await self.backend.drop_snapshot(name)


class SpreadBackend:
    """Implements SandboxBackend over sites."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = asyncio.Event()
        self.sites = [SandboxSite(name, self._changed) for name in names]

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        """Create a sandbox of `image` on the machine with the fewest."""
        async with (
            self.place() as site,
            site.open(image, limits, workdir=workdir, mounts=mounts, name=name) as sandbox,
        ):
            yield sandbox

    @asynccontextmanager
    async def place(self) -> AsyncIterator[SandboxSite]:
        """Choose the machine with the fewest sandboxes; one more counts there until the end.

        Waits while no server is up. Raises SandboxUnavailableError if none will be again.
        """
        site = await self._emptiest()
        site.num_open += 1
        try:
            yield site
        finally:
            site.num_open -= 1

    async def live(self) -> Sequence[LiveSandbox]:
        found = await asyncio.gather(*(site.live() for site in self.sites))
        return [each for some in found for each in some]

    async def remove(self, name: str) -> None:
        await asyncio.gather(*(site.remove(name) for site in self.sites))

    def price(self, limits: Limits) -> float:
        """Return 0: the machines are already paid for."""
        return 0.0

    async def _emptiest(self) -> SandboxSite:
        while not (serving := [site for site in self.sites if site.backend]):
            if all(site.is_over for site in self.sites):
                message = "no machine of the cluster serves sandboxes any more"
                hint = "see sandboxes-*.log in the run's logs; the same command resumes"
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
        # A sandbox that is half open must not stay behind.
        if not entering.done():
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
