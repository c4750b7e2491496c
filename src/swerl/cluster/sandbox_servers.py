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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from swerl.sandboxes._e2b_sandbox import E2BSandbox
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
SPARE = 2
"""Sandboxes that a server may hold per Episode: one may close while the next opens."""


@asynccontextmanager
async def serve_sandboxes(
    nodes: Sequence[Node], recipe: Recipe, *, logs: Path, emit: Emit
) -> AsyncIterator[SpreadBackend]:
    """Yield a backend whose sandboxes are spread over these nodes.

    Raises SandboxError if a machine cannot serve any.
    """
    changed = asyncio.Event()
    machines = [_Machine(node, recipe, changed, logs=logs, emit=emit) for node in nodes]
    supervisors: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(machine.start() for machine in machines))
        supervisors = [asyncio.create_task(machine.supervise()) for machine in machines]
        yield SpreadBackend(machines, changed)
    finally:
        # The supervisors stop first: they would restart the servers that end below.
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
        await asyncio.gather(*(machine.end() for machine in machines))


class SpreadBackend:
    """Implements SandboxBackend over machines."""

    def __init__(self, machines: Sequence[_Machine], changed: asyncio.Event) -> None:
        self._machines = machines
        self._changed = changed

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
        """Create a sandbox of `image` on the machine with the fewest.

        Waits while no server is up. Raises SandboxUnavailableError if none will be again.
        """
        machine = await self._emptiest()
        machine.num_open += 1
        try:
            backend = machine.backend
            assert backend is not None
            opened = backend.open(image, limits, workdir=workdir, mounts=mounts, name=name)
            async with machine.opened(opened) as sandbox:
                yield sandbox
        finally:
            machine.num_open -= 1

    def backends(self) -> Mapping[str, e2b.E2BBackend]:
        """Return the backends of the machines whose server is up, by the machines' names."""
        return {machine.name: machine.backend for machine in self._machines if machine.backend}

    async def live(self) -> Sequence[LiveSandbox]:
        lists = await asyncio.gather(*(backend.live() for backend in self.backends().values()))
        return [sandbox for sandboxes in lists for sandbox in sandboxes]

    async def remove(self, name: str) -> None:
        await asyncio.gather(*(backend.remove(name) for backend in self.backends().values()))

    def price(self, limits: Limits) -> float:
        """Return 0: the machines are already paid for."""
        return 0.0

    async def _emptiest(self) -> _Machine:
        while not (serving := [machine for machine in self._machines if machine.backend]):
            if all(machine.is_over for machine in self._machines):
                message = "no machine of the cluster serves sandboxes any more"
                hint = "see sandboxes-*.log in the run's logs; the same command resumes"
                raise SandboxUnavailableError(message, hint=hint)
            self._changed.clear()
            await self._changed.wait()
        return min(serving, key=lambda machine: machine.num_open)


class _Machine:
    """The server of one machine, and the sandboxes that are open there."""

    def __init__(
        self, node: Node, recipe: Recipe, changed: asyncio.Event, *, logs: Path, emit: Emit
    ) -> None:
        """`changed` is set when a server is up here, or none ever will be."""
        self.name = node.name
        self.num_open = 0
        """Sandboxes of this run there, including those being opened or closed."""
        self.backend: e2b.E2BBackend | None = None
        """None while no server is up."""
        self.is_over = False
        """True when no server will be up again."""
        self._node = node
        self._recipe = recipe
        self._changed = changed
        self._log = (logs / f"sandboxes-{node.name}.log").resolve()
        self._emit = emit
        self._process: RunningProcess | None = None
        self._open: set[E2BSandbox] = set()
        self._lost: asyncio.Future[SandboxLostError]

    async def start(self) -> None:
        """Start the server and connect to it. Raises SandboxError with its message."""
        argv = (PYTHON, "-m", "swerl.sandboxes.e2b_server.process")
        spec = ProcessSpec(argv, self._log, linked=True, guarded=True)
        self._process = await self._node.start(spec)
        try:
            async with asyncio.timeout(START_S):
                self.serve(await self._begin(self._process))
        except (TimeoutError, ConnectionError) as error:
            raise self._failed(f"it does not answer ({type(error).__name__})") from error

    def serve(self, backend: e2b.E2BBackend) -> None:
        """Open further sandboxes with this backend."""
        self.backend = backend
        # Each server has a future of its own, so a restart does not revive lost sandboxes.
        self._lost = asyncio.get_running_loop().create_future()
        self._changed.set()

    async def supervise(self) -> None:
        """Restart the server when it ends, up to RESTARTS times."""
        for restarts in reversed(range(RESTARTS)):
            how = await self._ended()
            self.lose(str(how))
            self._emit(
                Notice(
                    f"the sandbox server on {self._node.name} ended ({how}) with its sandboxes; "
                    f"restarting it, {restarts} restarts left"
                )
            )
            try:
                await self.start()
            except (ClusterError, SandboxError) as error:
                return self.give_up(str(error))
        self.give_up(str(await self._ended()))

    async def end(self) -> None:
        """Ask the server to remove its sandboxes and end; kill it if it does not."""
        await end_server(self._process)

    @asynccontextmanager
    async def opened(
        self, context: AbstractAsyncContextManager[E2BSandbox]
    ) -> AsyncIterator[E2BSandbox]:
        """Enter a sandbox's context. Raises SandboxLostError as soon as its server has ended."""
        # A restart replaces the future, but this sandbox belongs to the present server.
        lost = self._lost
        entering = asyncio.ensure_future(context.__aenter__())
        either: set[asyncio.Future[Any]] = {entering, lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                raise lost.result()
            sandbox = entering.result()
        finally:
            # A sandbox that is half open must not stay behind.
            if not entering.done():
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)
        self._open.add(sandbox)
        # The server may have ended before the sandbox was in the set.
        if lost.done():
            sandbox.lose(lost.result())
        try:
            yield sandbox
        finally:
            self._open.discard(sandbox)
            try:
                await context.__aexit__(None, None, None)
            except SandboxError:
                # A server that is gone has no sandbox left to close.
                if not lost.done():
                    raise

    async def _begin(self, process: RunningProcess) -> e2b.E2BBackend:
        """Send the server its settings; return a client of it."""
        recipe, key = self._recipe, new_key()
        request = ServeRequest(
            key=key,
            run=recipe.name,
            sandbox=recipe.sandbox.model_dump(mode="json"),
            host=self._node.address,
            max_sandboxes=SPARE * recipe.rollout.concurrency,
        )
        await process.send(request.line())
        answer = await process.receive()
        if not answer:
            raise self._failed(str(await asyncio.shield(process.ended)))
        reply = json.loads(answer)
        if "error" in reply:
            message = f"no sandboxes on {self._node.name}: {reply['error']}"
            raise SandboxError(message, hint=reply["hint"])
        options = e2b.Options(
            api_url=reply["url"],
            sandbox_url=reply["url"],
            image_key="image",
            creates_per_s=CREATES_PER_S,
            price_per_hour=0.0,
        )
        return e2b.connect(options, key, is_own=True)

    async def _ended(self) -> ProcessEnd:
        """Wait for the server's end; kill it if it is silent, such as one that is stopped."""
        process, backend = self._process, self.backend
        assert process is not None and backend is not None
        while not (await asyncio.wait([process.ended], timeout=ASK_S))[0]:
            try:
                async with asyncio.timeout(SILENT_S):
                    await backend.live()
            except TimeoutError:
                await process.signal(signal.SIGKILL)
            except SwerlError:
                pass  # it has just ended, or refuses: it answers
        return process.ended.result()

    def lose(self, why: str) -> None:
        """Fail everything in its sandboxes, and open none until another server is up."""
        self.backend = None
        message = f"the sandbox server on {self._node.name} ended: {why}"
        error = SandboxLostError(message, hint="its log is with the run's other logs")
        if not self._lost.done():
            self._lost.set_result(error)
        for sandbox in list(self._open):
            sandbox.lose(error)

    def give_up(self, why: str) -> None:
        self.is_over = True
        self.lose(why)
        self._changed.set()
        self._emit(Notice(f"{self._node.name} no longer serves sandboxes: {why}"))

    def _failed(self, why: str) -> SandboxError:
        message = f"the sandbox server on {self._node.name} did not come up: {why}: "
        return SandboxError(message + last_lines(self._log), hint=f"the whole log is {self._log}")
