"""The servers of one engine: who is in use, and calls to all of them.

A server that stops answering is given up: its requests fail, and nothing is sent there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from swerl.core.errors import EngineLostError
from swerl.engines._sglang_server import Server

WATCH_S = 10.0
"""Seconds that a look at a server may take."""
LOOK_S = 0.2
"""Seconds between two looks for a server, where none is left."""


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    RETRACT = "retract"
    """They keep their tokens and are prefilled again under the new weights: no stale cache."""
    ABORT = "abort"
    """They end; their sessions ask again."""
    IN_PLACE = "in_place"
    """They keep tokens and cache: fastest, and their keys stay those of the old weights."""


class Crew:
    """The servers, directly or behind a router, and whether they are paused."""

    def __init__(self, servers: Sequence[Server], mode: PauseMode) -> None:
        self.servers = list(servers)
        self.router: Server | None = None
        self.owns_router = False
        """Whether the run launched the router: without it the servers are still known."""
        self.paused = False
        self.mode = mode

    def alive(self) -> list[Server]:
        """Return the servers in use. Raises EngineLostError when nobody is left."""
        found = [server for server in self.servers if not server.lost]
        if self.router and self.router.lost and not self.owns_router:
            raise self.router.lost
        if not found:
            raise self.servers[0].lost if self.servers and self.servers[0].lost else _nobody()
        return found

    @property
    def ended(self) -> bool:
        """Whether every server is gone for good."""
        return all(server.ended for server in self.servers)

    async def reachable(self) -> list[Server]:
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
        for server in found:
            if server.url in back:
                server.heard()
        return found or self.alive()

    async def call_back(self) -> None:
        """Where no server is in use, use those that answer: they are to be given whole weights."""
        if self.servers and all(server.lost for server in self.servers):
            for server in await self.reachable():
                server.find()

    async def somebody_answers(self) -> bool:
        """Say whether a server is in use, or one that was given up answers."""
        try:
            return bool(await self.reachable())
        except EngineLostError:
            return False

    async def await_one(self, within_s: float) -> None:
        """Where no server is in use, wait until one answers again: it may be starting."""
        for _ in range(math.ceil(within_s / LOOK_S)):
            if self.ended or await self.somebody_answers():
                return
            await asyncio.sleep(LOOK_S)

    async def pause(self, servers: Sequence[Server] | None = None) -> list[Server]:
        """Pause every server, or these; return who answered."""
        self.paused = True
        body = {"mode": self.mode.value}
        return await self.all(lambda server: server.post("/pause_generation", body), servers)

    async def resume(self) -> None:
        """Let every server go on."""
        await self.all(lambda server: server.post("/continue_generation", {}))
        self.paused = False

    async def resume_who_is_left(self) -> None:
        """Let servers go on after a load, which has said so where nobody is left."""
        try:
            await self.resume()
        except EngineLostError:
            self.paused = False

    async def all(
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


def _nobody() -> EngineLostError:
    return EngineLostError("no engine is left", hint="start one; the same command resumes")
