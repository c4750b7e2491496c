"""The servers of one engine: find them, place sessions, pause, and check them every few seconds.

A server that stops answering is marked as lost: its requests fail, and it gets no more. It is used
again once it answers and holds the weights that serve. `_sglang_server` documents the states.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import WeightRef
from swerl.engines._process import how_ended
from swerl.engines._sglang_server import Connections, ServerState, SglangServer
from swerl.engines._sglang_wire import PARTIAL, PauseMode

WATCH_EVERY_S = 5.0
"""Seconds between two checks of a server."""
WATCH_S = 10.0
"""Seconds that one check may take."""
MISSES = 3
"""Failed checks in a row that mark a server as lost: a busy server misses one at times."""
STUCK_S = 300.0
"""Seconds without an answer from the scheduler: the limit of SGLang's own watchdog."""
POLL_S = 0.2
"""Seconds between two attempts to find a server if none is left."""
SESSION_IDLE_S = 1800.0
"""Seconds after which an idle session loses its server: more than a tool usually runs."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    pause_mode: PauseMode = PauseMode.RETRACT
    max_in_flight: int = 4096
    """Requests sent at once; more wait in the client. Servers have queues of their own."""
    reply_s: float | None = 3600.0
    """Seconds for one reply: a last limit, above every `budgets.model_call_s`."""
    load_s: float = 1800.0
    """Seconds for one server to load weights from disk; a large model takes minutes."""
    routed_experts: bool = False
    retries: int = 0
    """Times that a request starts again on another server because its own is lost."""
    wait_s: float = 0.0
    """Seconds that such a request waits if no server is in use: one may be starting."""
    streams: bool = True
    """True if the servers receive weights directly, without a folder."""
    answers_in_loads: bool = True
    """True if the servers answer while they load weights; then one that does not answer hangs."""
    server: type[SglangServer] = SglangServer
    """The calls of these servers."""


class ServerPool:
    """The servers, reached directly or through a router that was running already."""

    def __init__(
        self,
        urls: Sequence[str],
        connections: Connections,
        settings: ClientSettings,
        *,
        restarts: bool = False,
    ) -> None:
        """`restarts`: True if servers are supervised, so that a stuck one is replaced."""
        self.servers = [settings.server(url, connections) for url in dict.fromkeys(urls)]
        self.router: SglangServer | None = None
        self.settings = settings
        self.paused = False
        self.asleep = False
        """True while the servers' memory is lent to the trainer."""
        self.may_start = asyncio.Event()
        """Cleared while the trainer uses the servers' memory: a starting one would lack it."""
        self.may_start.set()
        self._starting: set[asyncio.Event] = set()
        """One per start under way, set at its end."""
        self.served: list[str] = []
        """Version of every update that all servers took, oldest first."""
        self.folder: WeightRef | None = None
        """Folder of the weights that serve; None if the trainer sent them without one."""
        self._missed: set[SglangServer] = set()
        """Servers that answer and lack the weights that serve."""
        self._any_missed = asyncio.Event()
        self.first_version = "default"
        """Version that the servers had at the start."""
        self.changing = asyncio.Lock()
        """Held while servers change their weights."""
        self._restarts = restarts
        self._connections = connections
        self._versions: set[str] = set()
        """Versions of the servers at the start."""
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Session -> its server and the time of its last request, oldest first."""
        self._num_sessions: Counter[str] = Counter()

    def in_use(self) -> list[SglangServer]:
        """Return the servers in use. Raises EngineLostError if none is left."""
        if self.router and self.router.lost:
            raise self.router.lost
        servers = [server for server in self.servers if server.in_use]
        if not servers:
            raise _no_server(self.servers)
        return servers

    @property
    def ended(self) -> bool:
        """True if no server can come back."""
        return all(server.state is ServerState.ENDED for server in self.servers)

    async def discover(self, timeout_s: float = WATCH_S) -> None:
        """Find the servers behind a single URL if it is a router.

        Raises EngineLostError if a router has no servers.
        """
        if len(self.servers) != 1:
            return
        (front,) = self.servers
        urls = await front.workers(timeout_s=timeout_s)
        if urls is None:
            return
        if not urls:
            raise EngineLostError(
                f"the router at {front.url} has no workers", hint="start its SGLang servers first"
            )
        self.router, self.servers = front, []
        self._set_servers(urls)

    def _set_servers(self, urls: Sequence[str]) -> None:
        """Replace the servers with a router's list."""
        by_url = {server.url: server for server in self.servers}
        for url in (each.rstrip("/") for each in urls):
            if url not in by_url:
                by_url[url] = self.settings.server(url, self._connections)
                if self.served:
                    by_url[url].lose("it has not loaded the weights that serve")
        self.servers = [by_url[url.rstrip("/")] for url in urls]

    async def check(self) -> None:
        """Read every server's version. Raises EngineError if one is not an SGLang server.

        Servers may hold different weights after a killed run: see `require_one_version`.
        """
        infos = await asyncio.gather(*(server.get("/model_info") for server in self.servers))
        versions = [str(info.get("weight_version")) for info in infos]
        self.first_version = versions[0]
        self._versions = {version for version in versions if not version.startswith(PARTIAL)}
        for server, version in zip(self.servers, versions, strict=True):
            if version.startswith(PARTIAL) and server.in_use:
                why = "an update of its weights was interrupted, or is under way"
                server.lose(why, to=ServerState.PARTIAL)

    async def require_one_version(self) -> None:
        """Raise EngineError if servers held different weights at the start and still do.

        Another process may have loaded all of them since.
        """
        if len(self._versions) <= 1 or self.served:
            return
        await self.check()
        if len(self._versions) > 1:
            raise EngineError(
                f"the servers hold different weights: {', '.join(sorted(self._versions))}",
                hint="load weights into all of them first",
            )

    def place(self, session: str) -> SglangServer:
        """Return the server of a session, or the router.

        A session stays on one server, where its prefix is cached. A new one goes to the server with
        the fewest sessions. Its hash decides between equals, so that the clients of several
        processes do not all start with the same server. Raises EngineLostError if none is left.
        """
        urls = {server.url: server for server in self.in_use()}
        if self.router:
            return self.router
        now = time.monotonic()
        while self._homes:
            idle, (home, last_s) = next(iter(self._homes.items()))
            if last_s > now - SESSION_IDLE_S:
                break
            del self._homes[idle]
            self._num_sessions[home] -= 1
        home, _ = self._homes.pop(session, ("", 0.0))
        if home:
            self._num_sessions[home] -= 1
        if home not in urls:
            home = min(urls, key=lambda url: (self._num_sessions[url], _hash(session, url)))
        self._homes[session] = (home, now)
        self._num_sessions[home] += 1
        return urls[home]

    async def is_gone(self, server: SglangServer) -> bool:
        """Check a server whose request failed; it is marked as lost if it does not answer."""
        if server.in_use:
            try:
                await server.get("/model_info", timeout_s=WATCH_S)
            except EngineError as error:
                server.lose(error)
        return not server.in_use

    async def reachable(self) -> list[SglangServer]:
        """Return the servers in use, and those out of use that answer. Raises EngineLostError."""

        async def answers(server: SglangServer) -> bool:
            if server.in_use or server.state is ServerState.ENDED:
                return server.in_use
            try:
                await server.get("/model_info", timeout_s=WATCH_S)
            except EngineError:
                return False
            server.answered()
            return True

        answering = await asyncio.gather(*map(answers, self.servers))
        servers = [server for server, is_up in zip(self.servers, answering, strict=True) if is_up]
        return servers or self.in_use()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Hold for the start of a server; wait until its memory is free."""
        await self.may_start.wait()
        ended = asyncio.Event()
        self._starting.add(ended)
        try:
            yield
        finally:
            ended.set()
            self._starting.discard(ended)

    async def lend(self) -> None:
        """Let no further server start, and wait for those that are starting."""
        self.may_start.clear()
        for ended in tuple(self._starting):
            await ended.wait()

    async def any_answers(self) -> bool:
        """Return True if a server is in use or answers."""
        try:
            return bool(await self.reachable())
        except EngineLostError:
            return False

    async def await_one(self) -> None:
        """If no server is in use, wait until one answers, unless none may start."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.wait_s):
                while not self.ended and self.may_start.is_set():
                    if await self.any_answers():
                        return
                    await asyncio.sleep(POLL_S)

    def add_missed(self, server: SglangServer) -> None:
        """Record that a server answers and lacks the weights that serve."""
        self._missed.add(server)
        self._any_missed.set()

    async def await_missed(self) -> None:
        """Wait until a server lacks the weights that serve."""
        await self._any_missed.wait()

    def take_missed(self) -> list[SglangServer]:
        """Return the servers that lack the weights that serve. Raises EngineError if none does."""
        servers = [server for server in self._missed if not server.in_use]
        self._missed.clear()
        self._any_missed.clear()
        if self.paused or not servers:
            raise EngineError("no server lacks weights", hint="the next update serves all")
        return servers

    async def pause(self, servers: Sequence[SglangServer] | None = None) -> list[SglangServer]:
        """Pause every server, or these; return those that answered."""
        self.paused = True
        body = {"mode": self.settings.pause_mode.value}
        return await self.call_all(lambda server: server.post("/pause_generation", body), servers)

    async def resume(self) -> None:
        await self.call_all(lambda server: server.post("/continue_generation", {}))
        self.paused = False

    async def resume_remaining(self) -> None:
        """Resume after an update, which has raised already if no server is left."""
        try:
            await self.resume()
        except EngineLostError:
            self.paused = False

    async def call_all(
        self,
        call: Callable[[SglangServer], Awaitable[object]],
        servers: Sequence[SglangServer] | None = None,
    ) -> list[SglangServer]:
        """Call every server, by default all in use; return those that answered, at least one.

        A server that is gone is marked as lost. Raises the EngineError of any other, and
        EngineLostError if none answered.
        """
        servers = self.in_use() if servers is None else servers
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
            raise _no_server(servers)
        return answered

    async def on_exit(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the only server's process ends, then take the server out of use for good."""
        code = await process.wait()
        for server in self.servers:
            server.end(f"its process ended: {how_ended(code)}")

    async def watch(self, take_back: Callable[[SglangServer], Coroutine[Any, Any, None]]) -> None:
        """Check the servers until cancelled, and call `take_back` with those that answer again.

        Checks go on while weights change: a server that does not answer would delay all of them.
        """
        returning: dict[str, asyncio.Task[None]] = {}
        inspected: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(WATCH_EVERY_S)
                await self._check_router()
                watched = [each for each in self.servers if each.state is not ServerState.ENDED]
                found = await asyncio.gather(*map(self._check_server, watched))
                for server, is_back in zip(watched, found, strict=True):
                    if is_back and _is_free(returning, server):
                        returning[server.url] = group.create_task(take_back(server))
                    inspects = self._restarts and self._at_rest and server.in_use
                    if inspects and _is_free(inspected, server):
                        inspected[server.url] = group.create_task(self._check_scheduler(server))

    @property
    def _at_rest(self) -> bool:
        return not self.changing.locked() and not self.paused

    async def _check_router(self) -> None:
        if self.router is None:
            return
        try:
            urls = await self.router.workers(timeout_s=WATCH_S)
        except EngineError as error:
            self._count_miss(self.router, error)
            return
        self.router.use()
        if self._at_rest and urls is not None:
            self._set_servers(urls)

    async def _check_server(self, server: SglangServer) -> bool:
        """Check once; return True if the server is out of use and can be taken back."""
        num_updates = len(self.served)
        try:
            info = await server.get("/model_info", timeout_s=WATCH_S)
        except EngineError as error:
            self._count_miss(server, error)
            return False
        server.answered()
        if not self._at_rest or len(self.served) != num_updates:
            return False
        version = str(info.get("weight_version"))
        if server.state in (ServerState.LOST, ServerState.PARTIAL):
            is_partial = version.startswith(PARTIAL)
            server.move(ServerState.PARTIAL if is_partial else ServerState.LOST)
        if self.served and version != self.served[-1]:
            server.lose(f"it holds weights {version!r}, and {self.served[-1]!r} serve")
        return not server.in_use

    async def _check_scheduler(self, server: SglangServer) -> None:
        """Mark a server as lost if its HTTP process answers and its scheduler does not.

        A late answer does not count if weights changed meanwhile.
        """
        num_updates, began = len(self.served), time.monotonic()
        try:
            await server.get("/server_info", timeout_s=STUCK_S)
        except EngineError as error:
            is_late = time.monotonic() - began >= STUCK_S
            is_same = self._at_rest and len(self.served) == num_updates
            if is_late and is_same and server.in_use:
                server.mark_hung(error)

    def _count_miss(self, server: SglangServer, error: EngineError) -> None:
        server.misses += 1
        may_hang = self.settings.answers_in_loads or not self.changing.locked()
        if server.misses >= MISSES and may_hang:
            server.mark_hung(error)


def _is_free(tasks: dict[str, asyncio.Task[None]], server: SglangServer) -> bool:
    return server.url not in tasks or tasks[server.url].done()


def _hash(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()


def _no_server(servers: Sequence[SglangServer]) -> EngineLostError:
    """Return the first server's error, if there is one."""
    reason = servers[0].lost if servers else None
    hint = "start one; the same command resumes the run"
    return reason or EngineLostError("no engine server is left", hint=hint)
