"""Servers that hold the same weights: who is alive, who holds what, all loaded or none.

A server that stops answering is given up: its requests fail, and nothing is sent there. The watch
takes it back once it answers again and holds the weights that serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from swerl.engines._placement import Placement
from swerl.engines._sglang_server import Clients, Server
from swerl.engines._sglang_update import PARTIAL, stream
from swerl.errors import EngineError, EngineLostError, TrainerError
from swerl.interfaces import WeightSource
from swerl.learning import Received, WeightRef

WATCH_EVERY_S = 5.0
"""Seconds between two looks at every server."""
WATCH_S = 10.0
"""Seconds that a look may take."""
MISSES = 3
"""Looks in a row that must fail: a busy server is late now and then."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Weights that serve, and that only a source can give again."""

    version: str
    source: WeightSource


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    RETRACT = "retract"
    """They keep their tokens and are prefilled again under the new weights: no stale cache."""
    ABORT = "abort"
    """They end; their sessions ask again."""
    IN_PLACE = "in_place"
    """They keep tokens and cache: fastest, and their keys stay those of the old weights."""


class Fleet:
    """The servers, directly or behind a router.

    `load_s` bounds the seconds that one server takes to load weights.
    """

    def __init__(
        self, urls: Sequence[str], clients: Clients, *, mode: PauseMode, load_s: float
    ) -> None:
        self.servers = [Server(url, clients) for url in dict.fromkeys(urls)]
        self.router: Server | None = None
        self.served: list[WeightRef | Streamed] = []
        """Every load that all servers took, oldest first."""
        self._clients = clients
        self._mode = mode
        self._load_s = load_s
        self._placement = Placement()
        self._versions: set[str] = set()
        """What the servers held when they were found."""
        self._paused = False
        self._asleep = False
        self._changing = asyncio.Lock()

    async def discover(self, *, timeout_s: float = WATCH_S) -> None:
        """Ask a lone URL whether it is a router, and a router for its servers."""
        front = self.router or (self.servers[0] if len(self.servers) == 1 else None)
        urls = await front.workers(timeout_s=timeout_s) if front else None
        if front is None or urls is None:
            return
        if not urls and self.router is None:
            message = f"the router at {front.url} has no workers"
            raise EngineLostError(message, hint="start its SGLang servers first")
        known = {} if self.router is None else {server.url: server for server in self.servers}
        for url in urls:
            if url.rstrip("/") not in known:
                newcomer = Server(url, self._clients)
                if self.served:
                    newcomer.lose("it has not loaded the weights that serve")
                known[newcomer.url] = newcomer
        self.router = front
        self.servers = [known[url.rstrip("/")] for url in urls]

    async def check(self) -> None:
        """Ask every server once. Raises EngineError where one is no server of this contract.

        Servers may hold different weights, as a killed run leaves them: see `agree`.
        """
        infos = await asyncio.gather(*(server.get("/model_info") for server in self.servers))
        found = [str(info.get("weight_version")) for info in infos]
        self._versions = {version for version in found if not version.startswith(PARTIAL)}
        for server, version in zip(self.servers, found, strict=True):
            if version.startswith(PARTIAL):
                server.is_partial = True
                server.lose("an update of its weights was interrupted, or is under way")

    async def agree(self) -> None:
        """Raise EngineError where servers were found with different weights and still hold them.

        Another process may have loaded all of them since.
        """
        if len(self._versions) <= 1 or self.served:
            return
        await self.check()
        if len(self._versions) > 1:
            message = f"the servers hold different weights: {', '.join(sorted(self._versions))}"
            raise EngineError(message, hint="load weights into all of them first")

    def place(self, session: str) -> Server:
        """Return where a session's requests go. Raises EngineLostError when nobody is left."""
        alive = {server.url: server for server in self.alive()}
        return self.router or alive[self._placement.place(session, list(alive))]

    def alive(self) -> list[Server]:
        """Return the servers in use. Raises EngineLostError when nobody is left."""
        found = [server for server in self.servers if not server.lost]
        if self.router and self.router.lost:
            raise self.router.lost
        if not found:
            raise self.servers[0].lost if self.servers and self.servers[0].lost else _nobody()
        return found

    @property
    def ended(self) -> bool:
        """Whether every server is gone for good."""
        return all(server.ended for server in self.servers)

    async def pause(self) -> None:
        """Pause every server."""
        self._paused = True
        await self._all(_pause(self._mode))

    async def resume(self) -> None:
        """Let every server go on."""
        await self._all(lambda server: server.post("/continue_generation", {}))
        self._paused = False

    async def load(self, weights: WeightRef) -> None:
        """Load weights into every server, or leave the old ones in all.

        Raises EngineError of the first server that refuses. One that cannot be put back to the
        old weights is given up, so that two versions never serve side by side.
        """
        async with self._changing, self._while_paused():
            servers = self.alive()
            await self._wake(servers, "weights")
            results = await asyncio.gather(
                *(self._put(server, weights) for server in servers), return_exceptions=True
            )
            refusal = next((each for each in results if isinstance(each, BaseException)), None)
            if refusal is None:
                await self._wake(self.alive(), "kv_cache")  # not all of them died of it
                self._asleep = False
                self.served.append(weights)
                return
            changed = [
                server
                for server, result in zip(servers, results, strict=True)
                if not server.lost and (result is None or not server.usable_again)
            ]
            await asyncio.gather(*map(self._put_back, changed))
            raise refusal

    async def receive(self, source: WeightSource) -> Received:
        """Send a source's weights into every server; those that do not take all are given up.

        Servers that were given up with weights of before take part where they answer. Raises
        EngineError where no server holds all; TrainerError where the source failed, and with it
        every server.
        """
        async with self._changing:
            servers = await self._reachable()
            resumes = not self._paused or self._asleep
            servers = await self._all(_pause(self._mode), servers)
            try:
                received = await self._stream(servers, source)
                self.served.append(Streamed(received.version, source))
            finally:
                if resumes:
                    await asyncio.shield(self._resume_after_load())
        return received

    async def _stream(self, servers: Sequence[Server], source: WeightSource) -> Received:
        await self._wake(servers, "weights")
        try:
            outcome = await stream(servers, source, flush=self._flushes)
        except BaseException:
            for server in servers:
                server.lose("an update of its weights was interrupted")
            raise
        for server in servers:
            if failure := outcome.failures.get(server.url):
                server.lose(failure)
            else:
                server.find()
        received = outcome.received
        await self._wake(self.alive(), "kv_cache")
        self._asleep = False
        return received

    async def sleep(self) -> None:
        """Have every server give its memory back; what it held is gone until the next weights.

        Raises EngineError where a server on a GPU would keep its memory.
        """
        async with self._changing:
            servers = await self._all(_require_saver)
            if not self._paused:
                await self.pause()
            self._asleep = True
            await self._all(lambda server: server.release(("kv_cache", "weights")), servers)

    async def mourn(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the process of the only server has ended, and give the server up for good."""
        code = await process.wait()
        for server in self.servers:
            server.end(f"its process ended with exit code {code}")

    async def is_gone(self, server: Server) -> bool:
        """Ask a server whose request broke off; give it up where it does not answer."""
        if not server.lost:
            try:
                await server.get("/model_info", timeout_s=WATCH_S)
            except EngineError as error:
                server.lose(error)
        return server.lost is not None

    async def watch(self) -> None:
        """Look after the servers until cancelled."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._changing.locked() or self._paused:
                continue
            if self.router:
                with contextlib.suppress(EngineError):
                    await self.discover()
            watched = [*self.servers, *([self.router] if self.router else [])]
            await asyncio.gather(*map(self._look, watched))

    @property
    def _flushes(self) -> bool:
        return self._mode is not PauseMode.IN_PLACE

    async def _reachable(self) -> list[Server]:
        """Return the servers in use, and those given up that answer. Raises EngineLostError."""
        given_up = [server for server in self.servers if server.lost and not server.ended]
        calls = (server.get("/model_info", timeout_s=WATCH_S) for server in given_up)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        back = {
            server.url
            for server, answer in zip(given_up, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        found = [server for server in self.servers if not server.lost or server.url in back]
        return found or self.alive()

    async def _wake(self, servers: Sequence[Server], tag: str) -> None:
        """Give servers the memory back that `sleep` took."""
        await asyncio.gather(*(server.reclaim(tag) for server in servers))

    async def _look(self, server: Server) -> None:
        num_loads = len(self.served)
        try:
            if server is self.router:
                await server.workers(timeout_s=WATCH_S)
                version = None
            else:
                info = await server.get("/model_info", timeout_s=WATCH_S)
                version = str(info.get("weight_version"))
        except EngineError as error:
            server.misses += 1
            if server.misses >= MISSES and not self._changing.locked():
                server.lose(error)
            return
        server.misses = 0
        if self._changing.locked() or len(self.served) != num_loads:
            return
        if server.is_partial and version is not None and not version.startswith(PARTIAL):
            server.is_partial = False  # who sends its weights is done
        wanted = self.served[-1] if self.served else None
        if wanted and version is not None and version != wanted.version:
            server.lose(f"it holds weights {version!r}, and {wanted.version!r} serve")
        if server.lost:
            await self._take_back(server, wanted)

    async def _take_back(self, server: Server, wanted: WeightRef | Streamed | None) -> None:
        """Use a server again that answers again, after it has loaded what serves.

        Where the trainer has gone on since, the server waits for the next weights.
        """
        async with self._changing:
            if wanted is None or server is self.router:
                if server.usable_again and not server.is_partial:
                    server.find()
                return
            with contextlib.suppress(EngineError, TrainerError):
                await server.post("/pause_generation", {"mode": PauseMode.RETRACT})
                await self._give(server, wanted, flush=True)
                await server.post("/continue_generation", {})
                server.find()

    async def _give(self, server: Server, weights: WeightRef | Streamed, *, flush: bool) -> None:
        """Have one server take weights, from their folder or from who holds them."""
        if isinstance(weights, WeightRef):
            await server.load(weights, flush=flush, timeout_s=self._load_s)
        else:
            outcome = await stream([server], weights.source, flush=flush, version=weights.version)
            _ = outcome.received

    async def _put(self, server: Server, weights: WeightRef) -> None:
        """Load into one server; one that dies of it is no longer one of them."""
        try:
            await self._give(server, weights, flush=self._flushes)
        except EngineLostError as error:
            server.lose(error)

    async def _put_back(self, server: Server) -> None:
        if not self.served:
            server.usable_again = False
            server.lose("it holds weights that the other servers refused")
            return
        try:
            await self._give(server, self.served[-1], flush=True)
        except (EngineError, TrainerError) as error:
            server.usable_again = False
            server.lose(error)

    async def _all(
        self, call: Callable[[Server], Awaitable[object]], servers: Sequence[Server] | None = None
    ) -> list[Server]:
        """Call every server, by default all in use; return who answered, at least one.

        One that is gone is given up. Raises EngineError of any other, EngineLostError of the last.
        """
        servers = self.alive() if servers is None else servers
        results = await asyncio.gather(*map(call, servers), return_exceptions=True)
        answered = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, EngineLostError):
                server.lose(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                answered.append(server)
        if not answered:
            raise servers[0].lost or _nobody()
        return answered

    @asynccontextmanager
    async def _while_paused(self) -> AsyncIterator[None]:
        """Pause around a block unless the caller has paused already."""
        was_paused = self._paused and not self._asleep
        if not self._paused:
            await self.pause()
        try:
            yield
        finally:
            if not was_paused:
                await asyncio.shield(self._resume_after_load())

    async def _resume_after_load(self) -> None:
        """Resume who is left; where nobody is, the load has said so already."""
        try:
            await self.resume()
        except EngineLostError:
            self._paused = False


async def _require_saver(server: Server) -> None:
    info = await server.get("/server_info")
    if info.get("device") != "cpu" and not info.get("enable_memory_saver"):
        message = f"{server.url} cannot give its memory back to the trainer"
        raise EngineError(message, hint="start it with --enable-memory-saver (engine.flags)")


def _pause(mode: PauseMode) -> Callable[[Server], Awaitable[object]]:
    return lambda server: server.post("/pause_generation", {"mode": mode})


def _nobody() -> EngineLostError:
    return EngineLostError("no engine is left", hint="start one; the same command resumes")
