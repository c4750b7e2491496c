"""The client of SGLang's HTTP contract, for SGLang itself and for servers that speak like it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from secrets import token_bytes
from typing import Any, TypeVar

from swerl.core.chat import Finish
from swerl.core.contracts import WeightSource
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import Received, WeightRef
from swerl.core.turn import Completion, Sampling
from swerl.engines._sglang_crew import LOOK_S
from swerl.engines._sglang_fleet import Fleet
from swerl.engines._sglang_match import require_match
from swerl.engines._sglang_server import Server, lost
from swerl.engines._sglang_settings import ClientSettings
from swerl.engines._sglang_update import PARTIAL
from swerl.engines._sglang_wire import ModelShape, generate_body, read_completion
from swerl.engines._usage import Usage, UsageMeter

ABORT_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between the tries of an abort: one that overtakes its request finds nothing to stop."""
ROUTING_HEADERS = ("X-SMG-Routing-Key", "X-SGL-Routing-Key")
"""By which routers keep a session on one server."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way."""

    rid: str
    server: Server
    over: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done where it is given up, failed where its server is."""

    def give_up(self) -> None:
        """Wait no longer for the answer."""
        if not self.stop.done():
            self.stop.set_result(None)


class HttpEngine:
    """An Engine behind URLs. Use `connect` to make one."""

    def __init__(self, fleet: Fleet, shape: ModelShape, settings: ClientSettings) -> None:
        self._fleet = fleet
        self._shape = shape
        self._settings = settings
        self._flights: dict[str, set[_Flight]] = defaultdict(set)
        self._numbers = count()
        self._salt = token_bytes(16)
        self._farewells: set[asyncio.Task[None]] = set()
        self._meter = UsageMeter()

    @property
    def url(self) -> str:
        """Where requests go: the router, or the first server."""
        return (self._fleet.crew.router or self._fleet.crew.servers[0]).url

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply. Raises EngineLostError when the engine is gone."""
        self._check_prompt(ids)
        await self._fleet.agree()
        num_loads = len(self._fleet.loads.served)
        routed_from = sampling.num_routed if self._settings.routed_experts else None

        def read(answer: Mapping[str, Any]) -> Completion:
            completion = read_completion(
                answer, self._shape, num_prompt=len(ids), routed_from=routed_from
            )
            self._check_versions(completion, num_loads)
            return completion

        completion = await self._sample_somewhere(ids, sampling, session, read)
        if completion is None:
            version = self._fleet.loads.served[-1].version if self._fleet.loads.served else ""
            return Completion((), (), Finish.ABORT, version, len(ids))
        self._meter.count(completion, num_prompt=len(ids))
        return completion

    async def abort(self, session: str) -> None:
        """Stop what the session is generating, and return when it has stopped."""
        flights = set(self._flights.get(session, ()))
        for wait_s in ABORT_WAITS_S:
            for flight in flights:
                self._leave(flight)
            over = [asyncio.ensure_future(flight.over.wait()) for flight in flights]
            if over:
                _, late = await asyncio.wait(over, timeout=wait_s)
                for task in late:
                    task.cancel()
            flights = {flight for flight in flights if not flight.over.is_set()}
        for flight in flights:
            flight.give_up()

    async def pause(self) -> None:
        """Stop taking up work until `resume`; what runs keeps its tokens unless set otherwise."""
        await self._fleet.crew.pause()

    async def load(self, weights: WeightRef) -> str:
        """Load published weights and return the version that now serves, on every server.

        Raises EngineError when a server refuses them or serves something else afterwards; the old
        ones serve on then.
        """
        await self._update(partial(self._fleet.loads.load, weights))
        return weights.version

    @property
    def streams(self) -> bool:
        """Whether `receive` and `sleep` can be used."""
        return self._settings.streams

    async def require_match(self, model: Path) -> None:
        """Raise EngineError where a server holds another vocabulary or tokenizer than `model`."""
        await require_match(self._fleet.crew.servers, model)

    async def receive(self, source: WeightSource) -> Received:
        """Take all weights of a source. Implements StreamedEngine."""
        return await self._update(partial(self._fleet.loads.receive, source))

    async def sleep(self) -> None:
        """Lend the GPUs' memory out until the next weights come. Implements ColocatedEngine."""
        await self._fleet.loads.sleep()

    async def resume(self) -> None:
        """Take up work again."""
        await self._fleet.crew.resume()

    async def close(self) -> None:
        """Stop what is under way; the servers live on."""
        flights = [one for flights in self._flights.values() for one in flights]
        for flight in flights:
            flight.give_up()
        await asyncio.gather(*(flight.over.wait() for flight in flights))
        if self._farewells:
            _, late = await asyncio.wait(self._farewells, timeout=sum(ABORT_WAITS_S))
            for task in late:
                task.cancel()

    async def usage(self) -> Usage:
        """Return what was used so far; `busy_s` by the engine's own account where it keeps one."""
        used = self._meter.usage
        return replace(used, busy_s=(await self._account()).get("busy_s", used.busy_s))

    async def busy_spans(self) -> list[tuple[float, float]]:
        """Return when the engine last computed, in seconds of CLOCK_MONOTONIC.

        Where the server keeps no such account: when it had at least one of our requests.
        """
        spans = (await self._account()).get("busy_spans", self._meter.spans)
        return [(start, end) for start, end in spans]

    async def _update(self, bring: Callable[[], Awaitable[T]]) -> T:
        """Bring weights in; where every server was lost of it, again once one has come back."""
        crew = self._fleet.crew
        for attempt in range(self._settings.retries + 1):
            await crew.await_one(self._settings.wait_s)
            try:
                return await bring()
            except EngineError:
                if attempt == self._settings.retries or await crew.somebody_answers():
                    raise
        raise AssertionError

    async def _sample_somewhere(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        session: str,
        read: Callable[[Mapping[str, Any]], Completion],
    ) -> Completion | None:
        """Sample; where the server is gone, begin anew on another. What it drew nobody saw.

        The second try goes past a router, which may not know yet who is gone.
        """
        for attempt in range(self._settings.retries + 1):
            server = await self._place(session, directly=attempt > 0)
            try:
                answer = await self._sample(ids, sampling, session, server)
                return None if answer is None else read(answer)
            except EngineLostError:
                if attempt == self._settings.retries or not await self._fleet.is_gone(server):
                    raise
        raise AssertionError

    async def _place(self, session: str, *, directly: bool) -> Server:
        """Return where a request goes, and wait for a server where none is left."""
        for _ in range(math.ceil(self._settings.wait_s / LOOK_S)):
            with contextlib.suppress(EngineLostError):
                return self._fleet.place(session, directly=directly)
            if self._fleet.crew.ended:
                break
            await asyncio.sleep(LOOK_S)
        return self._fleet.place(session, directly=directly)

    async def _sample(
        self, ids: Sequence[int], sampling: Sampling, session: str, server: Server
    ) -> Mapping[str, Any] | None:
        """Return a server's answer; None where the request was given up."""
        key = self._routing_key(session)
        # Of fixed width: SGLang aborts every request whose id begins with the one it is given.
        flight = _Flight(f"{key}_t{next(self._numbers):09d}", server)
        body = generate_body(ids, sampling, flight.rid, routed=self._settings.routed_experts)
        headers = dict.fromkeys(ROUTING_HEADERS, key) if self._fleet.crew.router else {}
        call = asyncio.create_task(flight.server.generate(body, headers))
        with self._noted(flight, session):
            try:
                return await self._first(call, flight)
            except asyncio.CancelledError:
                self._leave(flight)
                raise
            finally:
                call.cancel()

    async def _first(
        self, call: asyncio.Task[dict[str, Any]], flight: _Flight
    ) -> Mapping[str, Any] | None:
        """Wait for the answer, for its server's end, or until the request is given up."""
        reply_s = self._settings.reply_s
        both: set[asyncio.Future[Any]] = {call, flight.stop}
        await asyncio.wait(both, timeout=reply_s, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
        self._leave(flight)
        if flight.stop.done():
            return flight.stop.result()
        raise lost(flight.server.url, f"no reply within {reply_s} s")

    @contextmanager
    def _noted(self, flight: _Flight, session: str) -> Iterator[None]:
        """Keep a request where aborts and its server's end find it."""
        self._flights[session].add(flight)
        flight.server.waiting.add(flight.stop)
        self._meter.start()
        try:
            yield
        finally:
            self._meter.end()
            flight.over.set()
            flight.server.waiting.discard(flight.stop)
            if not flight.stop.cancel():
                flight.stop.exception()  # the server's end, if the answer came first after all
            self._flights[session].discard(flight)
            if not self._flights[session]:
                del self._flights[session]

    def _leave(self, flight: _Flight) -> None:
        """Abort a request at its server, on the side: nobody may have to wait for that."""
        task = asyncio.create_task(self._tell(flight))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _tell(self, flight: _Flight) -> None:
        """Abort a request where it runs; no router says where, so all its servers are told.

        A server that does not hear it is lost or will be; the request is given up all the same.
        """
        calls = (
            server.post("/abort_request", {"rid": flight.rid}, timeout_s=sum(ABORT_WAITS_S))
            for server in self._workers(flight.server)
        )
        with contextlib.suppress(EngineError):
            await asyncio.gather(*calls)

    def _workers(self, server: Server) -> list[Server]:
        if server is not self._fleet.crew.router:
            return [server]
        return [each for each in self._fleet.crew.servers if not each.lost]

    def _routing_key(self, session: str) -> str:
        """Name a session for routers and logs, without giving away its key."""
        return hashlib.blake2b(session.encode(), key=self._salt, digest_size=12).hexdigest()

    def _check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse what SGLang does not survive: it dies of an id outside its embedding."""
        import numpy as np

        num_vocab = self._shape.num_vocab
        known = np.asarray(ids)
        top = num_vocab if num_vocab is not None else math.inf
        wrong = known[(known < 0) | (known >= top)]
        if wrong.size:
            raise EngineError(
                f"prompt id {wrong[0]} is outside the vocabulary of {num_vocab}",
                hint="tokenizer and model belong to different families",
            )

    def _check_versions(self, completion: Completion, num_loads: int) -> None:
        """Refuse tokens of weights that nobody published: of a server that started anew, say."""
        given = [completion.weight_version, *(one.version for one in completion.weight_changes)]
        if any(version.startswith(PARTIAL) for version in given):
            raise EngineLostError(
                f"{self.url} answered with a part of its weights",
                hint="an update was interrupted; the next one mends it",
            )
        if not num_loads:
            return
        known = {weights.version for weights in self._fleet.loads.served[num_loads - 1 :]}
        if wrong := [version for version in given if version not in known]:
            raise EngineLostError(
                f"{self.url} answered with weights {wrong[0]!r}; {known} serve",
                hint="it started anew, or another client updates it",
            )

    async def _account(self) -> Mapping[str, Any]:
        """Return a lone server's own account; several have none that could be added up."""
        if self._fleet.crew.router or len(self._fleet.crew.servers) > 1:
            return {}
        return await self._fleet.crew.servers[0].get("/server_info")
