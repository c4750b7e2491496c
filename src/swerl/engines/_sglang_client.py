"""An Engine behind SGLang's HTTP contract, for SGLang itself and for servers that implement it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import resource
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from secrets import token_bytes
from typing import Any, TypeVar

import aiohttp

from swerl.core.chat import Finish
from swerl.core.contracts import WeightUpdate
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling
from swerl.engines import _sglang_update as updates
from swerl.engines._sglang_pool import POLL_S, ClientSettings, ServerPool
from swerl.engines._sglang_server import Connections, Host, SglangServer, lost, supervise
from swerl.engines._sglang_wire import (
    PARTIAL,
    ServedShape,
    WrittenPrompts,
    generate_body,
    read_completion,
)

KEEPALIVE_S = 2.0
"""Seconds to keep an idle connection: less than servers do, so that none is found closed."""
CONNECT_S = 30.0
"""Seconds to open a connection: with thousands at once, the last one waits for the others."""
SPARE_FILES = 512
"""Open files beside the connections."""
ABORT_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between the tries of an abort: one that overtakes its request finds nothing to stop."""
ROUTING_HEADERS = ("X-SMG-Routing-Key", "X-SGL-Routing-Key")
"""Headers by which routers keep a session on one server."""
NUM_SPANS = 4096
"""Busy spans that are kept: more than one training step makes."""

_T = TypeVar("_T")


@asynccontextmanager
async def connect(
    urls: Sequence[str],
    *,
    shape: ServedShape | None = None,
    settings: ClientSettings | None = None,
    process: asyncio.subprocess.Process | None = None,
    hosts: Sequence[Host] = (),
    notify: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[HttpEngine]:
    """Open a client of one server, of several, or of a router, and check them until it closes.

    `process` is the process of a single server: when it ends, the server is out of use for good.
    `hosts` are server processes that are restarted up to `settings.retries` times; `notify` gets a
    sentence about each restart. Raises EngineLostError if a server does not answer.
    """
    settings = settings or ClientSettings()
    _allow_files(settings.max_in_flight + SPARE_FILES)
    async with _http_client(settings.max_in_flight) as generate, _http_client(0) as control:
        connections = Connections(generate, control)
        pool = ServerPool(urls, connections, settings, restarts=bool(hosts))
        await _find(pool, urls)
        jobs = [pool.watch(partial(updates.take_back, pool))]
        if process:
            jobs.append(pool.on_exit(process))
        servers = {server.url: server for server in pool.servers}
        for host in hosts:
            server = servers[host.url]
            server.gpus = host.gpus
            restarts, turn = settings.retries, pool.starting
            jobs.append(supervise(host, server, restarts=restarts, notify=notify, turn=turn))
        tasks = [asyncio.create_task(job) for job in jobs]
        engine = HttpEngine(pool, shape or ServedShape())
        try:
            yield engine
        finally:
            for task in tasks:
                task.cancel()
            await engine.close()


async def _find(pool: ServerPool, urls: Sequence[str]) -> None:
    title = pool.settings.server.title
    try:
        await pool.discover()
        await pool.check()
    except EngineLostError as error:
        raise EngineLostError(
            f"no {title} server answers: {error}",
            hint="start it, or leave engine.url out to launch one",
        ) from error
    except EngineError as error:
        raise EngineError(
            f"{', '.join(urls)}: neither a server of {title} nor a router of some: {error}",
            hint="engine.url is a base URL, without a path",
        ) from error


@asynccontextmanager
async def _http_client(limit: int) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as client:
        yield client


def _allow_files(num_files: int) -> None:
    """Raise this process's limit of open files as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@dataclass(slots=True)
class BusySpans:
    """Times with at least one of this client's requests at the engine."""

    spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_SPANS))
    """Start and end of each, in seconds of CLOCK_MONOTONIC."""
    _num_in_flight: int = 0
    _since: float = 0.0

    def start(self) -> None:
        if self._num_in_flight == 0:
            self._since = time.monotonic()
        self._num_in_flight += 1

    def end(self) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self.spans.append((self._since, time.monotonic()))


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way."""

    rid: str
    server: SglangServer
    over: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done if the client gave the request up; failed if its server went out of use."""

    def give_up(self) -> None:
        if not self.stop.done():
            self.stop.set_result(None)


class HttpEngine:
    """Implements Engine and the optional contracts of engines. `connect` makes one."""

    def __init__(self, pool: ServerPool, shape: ServedShape) -> None:
        self.pool = pool
        self._shape = shape
        self._settings = pool.settings
        self._flights: dict[str, set[_Flight]] = defaultdict(set)
        self._numbers = count()
        self._salt = token_bytes(16)
        self._pending_aborts: dict[asyncio.Task[None], str] = {}
        """Requests for an abort under way, with their sessions."""
        self._busy = BusySpans()
        self._prompts = WrittenPrompts(shape.num_vocab)

    @property
    def url(self) -> str:
        """URL of the router, or of the first server."""
        return (self.pool.router or self.pool.servers[0]).url

    @property
    def streams(self) -> bool:
        """True if `update` and `sleep` can be used."""
        return self._settings.streams

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply. Raises EngineLostError if the engine is gone.

        If its server is gone, the request starts again on another: the lost tokens were never used.
        """
        prompt = self._prompts.write(ids, session)
        await self.pool.require_one_version()
        num_updates = len(self.pool.served)
        for attempt in range(self._settings.retries + 1):
            server = await self._place(session)
            try:
                answer = await self._sample(prompt, sampling, session, server)
                if answer is None:
                    served = self.pool.served
                    version = served[-1] if served else ""
                    return Completion((), (), Finish.ABORT, version, len(ids))
                routed_from = sampling.num_routed if self._settings.routed_experts else None
                completion = read_completion(
                    answer, self._shape, num_prompt=len(ids), routed_from=routed_from
                )
                self._check_versions(completion, num_updates)
                return completion
            except EngineLostError:
                if attempt == self._settings.retries or not await self.pool.is_gone(server):
                    raise
        raise AssertionError

    async def abort(self, session: str) -> None:
        """Stop the session's requests, and return when they have stopped.

        Raises EngineError if the server of one does not answer.
        """
        flights = set(self._flights.get(session, ()))
        for wait_s in ABORT_WAITS_S:
            for flight in flights:
                self._send_abort(flight, session)
            over = [asyncio.ensure_future(flight.over.wait()) for flight in flights]
            if over:
                _, late = await asyncio.wait(over, timeout=wait_s)
                for task in late:
                    task.cancel()
            flights = {flight for flight in flights if not flight.over.is_set()}
        for flight in flights:
            flight.give_up()
        if sent := [task for task, owner in self._pending_aborts.items() if owner == session]:
            await asyncio.wait(sent)
            for each in sent:
                each.result()

    async def pause(self) -> None:
        """Pause every server. Running requests keep their tokens, unless the pause mode differs."""
        await self.pool.pause()

    async def resume(self) -> None:
        await self.pool.resume()

    async def load(self, weights: WeightRef) -> str:
        """Load published weights into every server, and return their version.

        Raises EngineError if a server refuses them or then serves another version; the old weights
        then still serve.
        """
        for attempt in range(self._settings.retries + 1):
            await self.pool.await_one()
            try:
                await updates.load(self.pool, weights)
                break
            except EngineError:
                # If every server was lost in it, load again once one answers.
                if attempt == self._settings.retries or await self.pool.any_answers():
                    raise
        return weights.version

    @asynccontextmanager
    async def update(self, *, missed: bool = False) -> AsyncIterator[WeightUpdate]:
        """Open an update of all servers, or of those that missed the last one."""
        async with updates.update(self.pool, missed=missed) as opened:
            yield opened

    async def await_missed(self) -> None:
        """Wait until a server answers without the weights that serve."""
        await self.pool.await_missed()

    async def sleep(self) -> None:
        """Lend the GPUs' memory until the next weights arrive."""
        await updates.sleep(self.pool)

    async def close(self) -> None:
        """End the requests under way; the servers continue to run."""
        flights = [one for flights in self._flights.values() for one in flights]
        for flight in flights:
            flight.give_up()
        await asyncio.gather(*(flight.over.wait() for flight in flights))
        if self._pending_aborts:
            _, late = await asyncio.wait(self._pending_aborts, timeout=sum(ABORT_WAITS_S))
            for task in late:
                task.cancel()

    async def busy_spans(self) -> list[tuple[float, float]]:
        """Return the latest spans of computation, in seconds of CLOCK_MONOTONIC.

        If the server does not report them: the spans with at least one of our requests.
        """
        info: Mapping[str, Any] = {}
        if not self.pool.router and len(self.pool.servers) == 1:  # those of several overlap
            info = await self.pool.servers[0].get("/server_info")
        return [(start, end) for start, end in info.get("busy_spans", self._busy.spans)]

    async def _place(self, session: str) -> SglangServer:
        """Return the server for a request; if none is left, wait for one."""
        for _ in range(math.ceil(self._settings.wait_s / POLL_S)):
            with contextlib.suppress(EngineLostError):
                return self.pool.place(session)
            if self.pool.ended:
                break
            await asyncio.sleep(POLL_S)
        return self.pool.place(session)

    async def _sample(
        self, prompt: bytes, sampling: Sampling, session: str, server: SglangServer
    ) -> Mapping[str, Any] | None:
        """Return a server's answer; None if the request was given up."""
        # Routers and logs get a keyed hash of the session, not its name.
        key = hashlib.blake2b(session.encode(), key=self._salt, digest_size=12).hexdigest()
        # Fixed width: SGLang aborts every request whose id starts with the given one.
        flight = _Flight(f"{key}_t{next(self._numbers):09d}", server)
        body = generate_body(prompt, sampling, flight.rid, routed=self._settings.routed_experts)
        headers = dict.fromkeys(ROUTING_HEADERS, key) if self.pool.router else {}
        call = asyncio.create_task(server.generate(body, headers))
        reply_s = self._settings.reply_s
        with self._registered(flight, session):
            try:
                both: set[asyncio.Future[Any]] = {call, flight.stop}
                await asyncio.wait(both, timeout=reply_s, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return call.result()
                self._send_abort(flight, session)
                if flight.stop.done():
                    return flight.stop.result()
                raise lost(server.url, f"no reply within {reply_s} s")
            except asyncio.CancelledError:
                self._send_abort(flight, session)
                raise
            finally:
                call.cancel()

    @contextmanager
    def _registered(self, flight: _Flight, session: str) -> Iterator[None]:
        """Register a request for aborts and for the loss of its server."""
        self._flights[session].add(flight)
        flight.server.waiting.add(flight.stop)
        self._busy.start()
        try:
            yield
        finally:
            self._busy.end()
            flight.over.set()
            flight.server.waiting.discard(flight.stop)
            if not flight.stop.cancel():
                flight.stop.exception()  # read, because the answer may have come before the loss
            self._flights[session].discard(flight)
            if not self._flights[session]:
                del self._flights[session]

    def _send_abort(self, flight: _Flight, session: str) -> None:
        """Abort a request at its server, in the background.

        A router does not report which server has a request, so all of them get the abort. If a
        server does not answer, the request is given up all the same.
        """
        pool, server = self.pool, flight.server
        targets = [each for each in pool.servers if each.in_use]
        targets = targets if server is pool.router else [server]

        async def send() -> None:
            body, limit = {"rid": flight.rid}, sum(ABORT_WAITS_S)
            calls = [each.post("/abort_request", body, timeout_s=limit) for each in targets]
            await asyncio.gather(*calls)

        def forget(task: asyncio.Task[None]) -> None:
            del self._pending_aborts[task]
            if not task.cancelled():
                task.exception()  # read, because nobody may wait for it

        task = asyncio.create_task(send())
        self._pending_aborts[task] = session
        task.add_done_callback(forget)

    def _check_versions(self, completion: Completion, num_updates: int) -> None:
        """Refuse tokens of weights that were not published, such as those of a restarted server."""
        versions = [
            completion.weight_version,
            *(change.version for change in completion.weight_changes),
        ]
        if any(version.startswith(PARTIAL) for version in versions):
            raise EngineLostError(
                f"{self.url} answered with partly updated weights",
                hint="an update was interrupted; the next one repairs it",
            )
        if not num_updates:
            return
        serving = set(self.pool.served[num_updates - 1 :])
        if wrong := [version for version in versions if version not in serving]:
            raise EngineLostError(
                f"{self.url} answered with weights {wrong[0]!r}; {serving} serve",
                hint="it was restarted, or another client updates it",
            )
