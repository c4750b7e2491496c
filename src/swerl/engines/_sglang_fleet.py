"""The servers of one engine over time: found, placed on, watched, and taken back.

The watch gives up a server that stops answering. It is used again once it answers and holds the
weights that serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from swerl.core.errors import EngineError, EngineLostError
from swerl.engines._placement import Placement
from swerl.engines._process import how_ended
from swerl.engines._sglang_crew import WATCH_S, Crew, PauseMode
from swerl.engines._sglang_loads import Loads
from swerl.engines._sglang_router import enrol
from swerl.engines._sglang_server import Clients, Server
from swerl.engines._sglang_update import PARTIAL

WATCH_EVERY_S = 5.0
"""Seconds between two looks at every server."""
MISSES = 3
"""Looks in a row that must fail: a busy server is late now and then."""
STUCK_S = 300.0
"""Seconds without a word of the process that computes: as long as SGLang's own watchdog waits."""


class Fleet:
    """The servers, directly or behind a router.

    `load_s` bounds the seconds that one server takes to load weights. One that does not answer in
    loads is not held to be hung while its weights change.
    """

    def __init__(
        self,
        urls: Sequence[str],
        clients: Clients,
        *,
        mode: PauseMode,
        load_s: float,
        answers_in_loads: bool = True,
    ) -> None:
        self.crew = Crew([Server(url, clients) for url in dict.fromkeys(urls)], mode)
        self.loads = Loads(self.crew, load_s)
        self.restarts = False
        """Whether somebody starts servers again: only then it pays to give up one that is stuck."""
        self._answers_in_loads = answers_in_loads
        self._clients = clients
        self._placement = Placement()
        self._versions: set[str] = set()
        """What the servers held when they were found."""

    async def discover(self, *, timeout_s: float = WATCH_S) -> None:
        """Ask a lone URL whether it is a router, and a router for its servers."""
        if self.crew.owns_router:
            return
        front = self.crew.router or (self.crew.servers[0] if len(self.crew.servers) == 1 else None)
        urls = await front.workers(timeout_s=timeout_s) if front else None
        if front is None or urls is None:
            return
        if not urls and self.crew.router is None:
            raise EngineLostError(
                f"the router at {front.url} has no workers", hint="start its SGLang servers first"
            )
        known = (
            {} if self.crew.router is None else {server.url: server for server in self.crew.servers}
        )
        for url in urls:
            if url.rstrip("/") not in known:
                newcomer = Server(url, self._clients)
                if self.loads.served:
                    newcomer.lose("it has not loaded the weights that serve")
                known[newcomer.url] = newcomer
        self.crew.router = front
        self.crew.servers = [known[url.rstrip("/")] for url in urls]

    async def check(self) -> None:
        """Ask every server once. Raises EngineError where one is no server of this contract.

        Servers may hold different weights, as a killed run leaves them: see `agree`.
        """
        infos = await asyncio.gather(*(server.get("/model_info") for server in self.crew.servers))
        found = [str(info.get("weight_version")) for info in infos]
        self.loads.first_version = found[0]
        self._versions = {version for version in found if not version.startswith(PARTIAL)}
        for server, version in zip(self.crew.servers, found, strict=True):
            if version.startswith(PARTIAL):
                server.is_partial = True
                server.lose("an update of its weights was interrupted, or is under way")

    async def agree(self) -> None:
        """Raise EngineError where servers were found with different weights and still hold them.

        Another process may have loaded all of them since.
        """
        if len(self._versions) <= 1 or self.loads.served:
            return
        await self.check()
        if len(self._versions) > 1:
            raise EngineError(
                f"the servers hold different weights: {', '.join(sorted(self._versions))}",
                hint="load weights into all of them first",
            )

    def place(self, session: str, *, directly: bool = False) -> Server:
        """Return where a session's requests go, past a router where asked or where ours is lost.

        Raises EngineLostError when nobody is left.
        """
        alive = {server.url: server for server in self.crew.alive()}
        if self.crew.router and not directly and not self.crew.router.lost:
            return self.crew.router
        return alive[self._placement.place(session, list(alive))]

    async def mourn(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the process of the only server has ended, and give the server up for good."""
        code = await process.wait()
        for server in self.crew.servers:
            server.end(f"its process ended: {how_ended(code)}")

    async def is_gone(self, server: Server) -> bool:
        """Ask a server whose request broke off; give it up where it does not answer.

        Of a router it cannot be told whose request it was: all are asked, and the answer is yes.
        """
        if server is self.crew.router:
            alive = [each for each in self.crew.servers if not each.lost]
            await asyncio.gather(*map(self.is_gone, alive))
            return True
        if not server.lost:
            try:
                await server.get("/model_info", timeout_s=WATCH_S)
            except EngineError as error:
                server.lose(error)
        return server.lost is not None

    async def watch(self) -> None:
        """Look after the servers until cancelled.

        Also while weights change: a server that answers nothing would hold up all of them.
        """
        returning: dict[str, asyncio.Task[None]] = {}
        asked: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(WATCH_EVERY_S)
                if self._is_at_rest and self.crew.router:
                    with contextlib.suppress(EngineError):
                        await self.discover()
                watched = [*self.crew.servers, *([self.crew.router] if self.crew.router else [])]
                found = await asyncio.gather(*map(self._look, watched))
                for server in (
                    each for each, is_back in zip(watched, found, strict=True) if is_back
                ):
                    if server.url not in returning or returning[server.url].done():
                        taking = self.loads.take_back(server)
                        returning[server.url] = group.create_task(taking)
                for server in self.crew.servers if self.restarts and self._is_at_rest else ():
                    if not server.lost and (server.url not in asked or asked[server.url].done()):
                        asked[server.url] = group.create_task(self._look_inside(server))

    @property
    def _is_at_rest(self) -> bool:
        return not self.loads.changing.locked() and not self.crew.paused

    async def _look(self, server: Server) -> bool:
        """Look once; return whether a server that was given up can be taken back."""
        num_loads = len(self.loads.served)
        try:
            if server is self.crew.router:
                version = None
                if self.crew.owns_router and self._is_at_rest:
                    await enrol(server, self.crew.servers)
                else:
                    await server.workers(timeout_s=WATCH_S)
            else:
                info = await server.get("/model_info", timeout_s=WATCH_S)
                version = str(info.get("weight_version"))
        except EngineError as error:
            self._miss(server, error)
            return False
        server.heard()
        if not self._is_at_rest or len(self.loads.served) != num_loads:
            return False
        if server.lost and version is not None:
            server.is_partial = version.startswith(PARTIAL)  # until who sends weights is done
        wanted = self.loads.served[-1] if self.loads.served else None
        if wanted and version is not None and version != wanted.version:
            server.lose(f"it holds weights {version!r}, and {wanted.version!r} serve")
        return server.lost is not None

    async def _look_inside(self, server: Server) -> None:
        """Give a server up whose HTTP process answers while the one that computes does not."""
        num_loads, began = len(self.loads.served), time.monotonic()
        try:
            await server.get("/server_info", timeout_s=STUCK_S)
        except EngineError as error:
            is_late = time.monotonic() - began >= STUCK_S
            is_same = self._is_at_rest and len(self.loads.served) == num_loads
            if is_late and is_same and not server.lost:
                server.silence(error)

    def _miss(self, server: Server, error: EngineError) -> None:
        server.misses += 1
        if server.misses < MISSES:
            return
        if self._answers_in_loads or not self.loads.changing.locked():
            server.silence(error)
