"""One SGLang server: its state, the calls to it, and its restarts.

Requests go only to servers in use: `serving` and `updating`. TRANSITIONS lists every change that is
allowed, and these events make them (`end` leads from every state to `ended`):

    event         made by             changes
    begin_update  weight updates      serving -> updating; out of use -> stale
    keep_weights  weight updates      updating -> serving: the server refused the weights
    use           updates, the pool   any but ended -> serving: it has the weights that serve
    lose          pool, client        serving -> lost, or `to`; updating -> stale
    lose to stale updates, supervise  any but ended -> stale
    move          pool's checks       lost <-> partial, by the version that the server reports
    restarted     supervise           stale -> restarted; other states stay
    end           supervise, pool     -> ended: nothing starts the server again

A request is never sent again to a server that may have sampled from it: its tokens would be drawn
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import aiohttp
import orjson

from swerl.core.chat import Json
from swerl.core.errors import EngineError, EngineLostError, SwerlError

CONNECT_TRIES = 3
"""Attempts to open a connection: a server that restarts its listener is back within a second."""
CONTROL_S = 120.0
"""Seconds for a call that samples nothing; a pause waits for one step of the whole batch."""
UNAVAILABLE = frozenset({502, 503, 504})
"""Statuses of a router whose worker died, and of a server that is full or ends."""
_WORKER_FAILED = "call_upstream"
"""Prefix of a router's error codes for a worker that it could not reach, or that died."""
_DP_RANK = re.compile(r"@\d+$")
"""Suffix of a worker's URL in routers that list data-parallel ranks."""


class ServerState(StrEnum):
    """Use of a server, and the weights that it holds."""

    SERVING = "serving"
    """In use."""
    UPDATING = "updating"
    """In use and paused; its weights are released or being replaced."""
    LOST = "lost"
    """Out of use: it does not answer, or holds other weights than the pool serves."""
    PARTIAL = "partial"
    """Out of use until another client's weight update is complete."""
    STALE = "stale"
    """Out of use: its weights are released, mixed or unknown, and it needs all of them again."""
    RESTARTED = "restarted"
    """Out of use: it runs again, with the weights that it was started on."""
    ENDED = "ended"
    """Out of use for good: nothing starts it again."""


_S = ServerState
IN_USE = frozenset({_S.SERVING, _S.UPDATING})
TRANSITIONS: Mapping[ServerState, frozenset[ServerState]] = {
    _S.SERVING: frozenset({_S.UPDATING, _S.LOST, _S.PARTIAL, _S.STALE, _S.ENDED}),
    _S.UPDATING: frozenset({_S.SERVING, _S.STALE, _S.ENDED}),
    _S.LOST: frozenset({_S.SERVING, _S.PARTIAL, _S.STALE, _S.ENDED}),
    _S.PARTIAL: frozenset({_S.SERVING, _S.LOST, _S.STALE, _S.ENDED}),
    _S.STALE: frozenset({_S.SERVING, _S.RESTARTED, _S.ENDED}),
    _S.RESTARTED: frozenset({_S.SERVING, _S.STALE, _S.ENDED}),
    _S.ENDED: frozenset(),
}
"""State -> the states that may follow it."""


@dataclass(frozen=True, slots=True)
class Connections:
    """HTTP clients, in two pools so that an abort never queues behind the request it aborts."""

    generate: aiohttp.ClientSession
    control: aiohttp.ClientSession


class SglangServer:
    """One base URL: an SGLang server, or a router in front of several."""

    title = "SGLang"
    """Name of its software in messages."""
    generate_path = "/generate"

    def __init__(self, url: str, connections: Connections) -> None:
        self.url = url.rstrip("/")
        self.state = ServerState.SERVING
        self.lost: EngineLostError | None = None
        """The reason why it is out of use; None while it is in use."""
        self.waiting: set[asyncio.Future[None]] = set()
        """Futures that fail as soon as the server goes out of use."""
        self.misses = 0
        """Checks in a row that it did not answer."""
        self.hung = asyncio.Event()
        """Set while it runs and answers nothing: `supervise` then restarts it."""
        self.released: set[str] = set()
        """Kinds of memory that it gave back: `weights`, `kv_cache`."""
        self.known_kinds: set[str] = set()
        """Kinds of parameters whose layout agreed with the trainer's at least once."""
        self.gpus: tuple[str, ...] = ()
        """Uuids of its GPUs, if this run started it and knows them."""
        self._limits: set[asyncio.Timeout] = set()
        """Time limits of the calls under way."""
        self._connections = connections

    @property
    def in_use(self) -> bool:
        """True if requests may go here."""
        return self.state in IN_USE

    def move(self, state: ServerState) -> None:
        """Change the state; a change to the same state has no effect.

        Raises RuntimeError on a change that TRANSITIONS does not list.
        """
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"{self.url} cannot go from {self.state} to {state}")
        self.state = state

    def lose(self, why: Exception | str, *, to: ServerState = ServerState.LOST) -> None:
        """Take the server out of use; its requests fail.

        A server that is already out of use keeps its reason; `to` STALE marks its weights as lost.
        """
        if self.in_use:
            self.move(ServerState.STALE if self.state is ServerState.UPDATING else to)
            self._fail(lost(self.url, why))
        elif to is ServerState.STALE and self.state is not ServerState.ENDED:
            self.move(to)

    def end(self, why: str) -> None:
        """Take the server out of use for good; its error is not retryable."""
        self.move(ServerState.ENDED)
        error = lost(self.url, why)
        self._fail(EngineLostError(str(error), hint=error.hint, retryable=False))

    def mark_hung(self, why: EngineError) -> None:
        """Take a server that does not answer out of use, and cancel every call to it."""
        self.lose(why)
        self.hung.set()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # a moment in the past

    def restarted(self) -> None:
        """Record that the process runs again, with the weights that it was started on.

        If the pool has already given it weights, these stay.
        """
        if self.state is ServerState.STALE:
            self.move(ServerState.RESTARTED)
        self.released.clear()
        self.answered()

    def answered(self) -> None:
        self.misses = 0
        self.hung.clear()

    def use(self) -> None:
        """Put the server into use: it holds all weights that serve, or is about to load them."""
        if self.state is ServerState.ENDED:
            return
        self.move(ServerState.SERVING)
        self.lost = None
        self.answered()

    def begin_update(self) -> None:
        """Record that its weights are about to change."""
        if self.in_use:
            self.move(ServerState.UPDATING)
        elif self.state is not ServerState.ENDED:
            self.move(ServerState.STALE)

    def keep_weights(self) -> None:
        """Record that it refused an update and holds its old weights."""
        if self.state is ServerState.UPDATING:
            self.move(ServerState.SERVING)

    def _fail(self, error: EngineLostError) -> None:
        self.lost = error
        for future in self.waiting:
            if not future.done():
                future.set_exception(error)

    async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Sample one reply. Raises EngineLostError, at once if the server is out of use."""
        if self.lost:
            raise self.lost
        return await self._call("POST", self.generate_path, body, headers=headers)

    async def post(
        self, path: str, body: Mapping[str, Json], *, timeout_s: float = CONTROL_S
    ) -> dict[str, Any]:
        """Send a request that samples nothing. Raises EngineError."""
        return await self._call("POST", path, body, timeout_s=timeout_s)

    async def get(self, path: str, *, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        """Read a value. Raises EngineError."""
        return await self._call("GET", path, None, timeout_s=timeout_s)

    async def workers(self, *, timeout_s: float = CONTROL_S) -> list[str] | None:
        """Return the servers behind a router; None if this is a server itself."""
        try:
            answer = await self.get("/workers", timeout_s=timeout_s)
        except EngineLostError:
            raise
        except EngineError:
            return None
        listed = answer.get("workers")
        if not isinstance(listed, list):
            return None
        return list(dict.fromkeys(_DP_RANK.sub("", str(worker["url"])) for worker in listed))

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send one request; it is tried again only if no connection was made."""
        for attempt in range(CONNECT_TRIES):
            try:
                async with self._limit(timeout_s):
                    return await self._call_once(method, path, body, headers or {})
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if attempt + 1 == CONNECT_TRIES:
                    raise lost(self.url, error) from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                raise lost(self.url, error) from error
            except TimeoutError as error:
                hung = self.hung.is_set() and self.lost
                raise lost(self.url, hung or f"{path} took over {timeout_s} s") from error
            await asyncio.sleep(0.1 * 2**attempt * (1 + random.random()))
        raise AssertionError

    @asynccontextmanager
    async def _limit(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Bound a call by its own limit and by `mark_hung`. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def _call_once(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        pools = self._connections
        client = pools.generate if path == self.generate_path else pools.control
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **headers}
        async with client.request(method, self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
        if response.status not in (200, 202):
            text = raw[:500].decode(errors="replace")
            message = f"{path} answered {response.status}: {text}"
            if response.status in UNAVAILABLE or _WORKER_FAILED in text:
                raise lost(self.url, message)
            raise EngineError(message, hint="the engine's log has the details")
        if "json" not in response.content_type:
            return {}
        with contextlib.suppress(orjson.JSONDecodeError):
            answer = orjson.loads(raw)
            if answer is None:  # from routes that return nothing
                return {}
            if isinstance(answer, dict):
                return answer
        raise EngineError(
            f"{path} answered {raw[:200]!r}, not a JSON object",
            hint=f"{self.url} does not implement {self.title}'s contract",
        )


def lost(url: str, why: Exception | str) -> EngineLostError:
    """Build the error for a server that is gone."""
    is_lost = isinstance(why, EngineLostError)
    message = str(why) if is_lost else f"the engine at {url} is gone: {why}"
    return EngineLostError(
        message, hint="see its log for the reason; the same command resumes the run"
    )


class Host(Protocol):
    """The process of one server, through all its starts."""

    @property
    def url(self) -> str: ...

    @property
    def gpus(self) -> tuple[str, ...]:
        """Uuids of its GPUs in the order of its ranks; empty if unknown."""

    async def start(self) -> None:
        """End the running process, start a new one, and wait until it serves. Raises SwerlError."""

    async def stop(self) -> None:
        """End the process, also if it ignores signals."""

    async def ended(self) -> str:
        """Wait until the process has ended, and return the reason."""


async def supervise(
    host: Host,
    server: SglangServer,
    *,
    restarts: int,
    notify: Callable[[str], None],
    turn: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Restart a server each time it ends or hangs, at most `restarts` times, each within a `turn`.

    It starts with the run's first weights. The pool uses it again once it holds the weights that
    serve.
    """
    for number in range(1, restarts + 1):
        why = f"{await _until_over(host, server)}; restarting it ({number} of {restarts})"
        notify(f"the server at {host.url} is marked as lost: {why}")
        server.lose(why, to=ServerState.STALE)
        try:
            async with turn():
                try:
                    await host.start()
                except SwerlError:
                    await host.stop()  # a process that hangs does not end by itself
                    raise
                server.restarted()
        except SwerlError as error:
            notify(f"the server at {host.url} did not restart: {error}")
    why = await _until_over(host, server)
    notify(f"the server at {host.url} is lost and will not be restarted: {why}")
    server.end(why)


async def _until_over(host: Host, server: SglangServer) -> str:
    """Wait until a server ends, or end it once it hangs; return the reason."""
    ended = asyncio.ensure_future(host.ended())
    hung = asyncio.ensure_future(server.hung.wait())
    try:
        await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        await host.stop()
        return "it ran but did not answer"
    finally:
        ended.cancel()
        hung.cancel()
