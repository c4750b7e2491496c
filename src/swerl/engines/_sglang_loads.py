"""What the servers of an engine hold: every set of weights that serves, whole in all or in none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swerl.core.contracts import WeightSource
from swerl.core.errors import EngineError, EngineLostError, TrainerError
from swerl.core.learning import Received, WeightRef
from swerl.engines._sglang_crew import Crew, PauseMode
from swerl.engines._sglang_server import Server
from swerl.engines._sglang_update import set_version, stream


@dataclass(frozen=True, slots=True)
class Streamed:
    """Weights that serve, and that only a source can give again."""

    version: str
    source: WeightSource


class Loads:
    """Brings weights into a crew. `load_s` bounds the seconds of one server's load from disk."""

    def __init__(self, crew: Crew, load_s: float) -> None:
        self.served: list[WeightRef | Streamed] = []
        """Every load that all servers took, oldest first."""
        self.first_version = "default"
        """What the servers held when they were found."""
        self.changing = asyncio.Lock()
        """Held while servers change what they hold."""
        self._crew = crew
        self._load_s = load_s
        self._asleep = False

    async def load(self, weights: WeightRef) -> None:
        """Load weights into every server, or leave the old ones in all.

        Raises EngineError of the first server that refuses. One that cannot be put back to the
        old weights is given up, so that two versions never serve side by side. Servers that an
        interrupted update left mixed are loaded where no others are left.
        """
        async with self.changing, self._while_paused():
            servers = self._crew.alive()
            servers = await self._wake(servers, "weights")
            results = await asyncio.gather(
                *(self._put(server, weights) for server in servers), return_exceptions=True
            )
            refusal = next((each for each in results if isinstance(each, BaseException)), None)
            if refusal is None:
                await self._wake(self._crew.alive(), "kv_cache")  # not all of them died of it
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
        async with self.changing:
            servers = await self._crew.reachable()
            resumes = not self._crew.paused or self._asleep
            servers = await self._crew.pause(servers)
            try:
                received = await self._stream(servers, source)
                self.served.append(Streamed(received.version, source))
            finally:
                if resumes:
                    await asyncio.shield(self._crew.resume_who_is_left())
        return received

    async def _stream(self, servers: Sequence[Server], source: WeightSource) -> Received:
        servers = await self._wake(servers, "weights")
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
        await self._wake(self._crew.alive(), "kv_cache")
        self._asleep = False
        return received

    async def sleep(self) -> None:
        """Have every server give its memory back; what it held is gone until the next weights.

        Raises EngineError where a server on a GPU would keep its memory.
        """
        async with self.changing:
            servers = await self._crew.all(_require_saver)
            if not self._crew.paused:
                await self._crew.pause()
            self._asleep = True
            await self._crew.all(lambda server: server.release(("kv_cache", "weights")), servers)

    async def take_back(self, server: Server) -> None:
        """Use a server again that answers again, after it has loaded what serves.

        Where the trainer has gone on since, or all are paused, it waits for the next weights.
        """
        async with self.changing:
            if not server.lost or self._crew.paused:
                return
            wanted = self.served[-1] if self.served else None
            if wanted is None or server is self._crew.router:
                if server.started_anew and server is not self._crew.router:
                    with contextlib.suppress(EngineError):
                        await set_version(server, self.first_version)
                        server.find()
                elif server.usable_again and not server.is_partial:
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

    @asynccontextmanager
    async def _while_paused(self) -> AsyncIterator[None]:
        """Pause around a block unless the caller has paused already."""
        was_paused = self._crew.paused and not self._asleep
        await self._crew.call_back()
        if not self._crew.paused:
            await self._crew.pause()
        try:
            yield
        finally:
            if not was_paused:
                await asyncio.shield(self._crew.resume_who_is_left())

    async def _wake(self, servers: Sequence[Server], kind: str) -> list[Server]:
        """Give servers the memory back that `sleep` took; return those that live."""
        return await self._crew.all(lambda server: server.reclaim(kind), servers)

    @property
    def _flushes(self) -> bool:
        return self._crew.mode is not PauseMode.IN_PLACE


async def _require_saver(server: Server) -> None:
    info = await server.get("/server_info")
    if info.get("device") != "cpu" and not info.get("enable_memory_saver"):
        raise EngineError(
            f"{server.url} cannot give its memory back to the trainer",
            hint="start it with --enable-memory-saver (engine.flags)",
        )
