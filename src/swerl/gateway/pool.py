"""GatewayPool: several gateway processes behind one address, for more than one core can serve.

A session lives in one process. A sandbox's own listening socket goes to that process; connections
to the shared address are handed over one request at a time. A process that dies takes its sessions
with it and is replaced; processes end with their controller, also when that is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from swerl.core.contracts import Endpoint
from swerl.core.errors import GatewayError
from swerl.core.events import ignore
from swerl.core.turn import Sampling
from swerl.gateway.acceptor import Acceptor
from swerl.gateway.app import HOST, listen, url_of
from swerl.gateway.limits import SessionLimits
from swerl.gateway.orders import WorkerSetup
from swerl.gateway.pulse import OnLoad
from swerl.gateway.remote import RemoteSession, Worker, tail
from swerl.gateway.routes import Routes
from swerl.gateway.sessions import TurnRecord, new_key

if TYPE_CHECKING:
    from types import TracebackType

START_S = 60.0
"""Seconds for the processes to serve: a large tokenizer takes a few on a busy machine."""
_PAUSES_S = (0.0, 1.0, 5.0, 30.0)
"""Seconds before a process that died is replaced, and before one that died again at once."""


class GatewayPool:
    """Answers agents in several processes. Implements SessionSource."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        num_processes: int,
        host: str = HOST,
        port: int = 0,
        on_load: OnLoad = ignore,
        on_death: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Listen on `host`; `on_death` is told what happened when a process dies."""
        self.url = ""
        self._setup = setup
        self._num_processes = num_processes
        self._host = host
        self._port = port
        self._on_load = on_load
        self._on_death = on_death
        self._routes = Routes()
        self._workers: list[Worker] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._sessions: dict[str, RemoteSession] = {}
        self._keys: dict[str, RemoteSession] = {}
        self._acceptor: Acceptor | None = None

    async def __aenter__(self) -> Self:
        listening = listen(self._host, self._port)
        self.url = url_of(self._host, listening)
        try:
            await self._start()
        except BaseException:
            listening.close()
            await self._end()
            raise
        self._acceptor = Acceptor(listening, self._server_of)
        self._acceptor.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        finally:
            if self._acceptor:
                await self._acceptor.stop()
            await self._end()

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_turn: Callable[[TurnRecord], None] | None = None,
    ) -> RemoteSession:
        """Open a session in the process that serves the fewest, of those that serve.

        Raises GatewayError where a session of this id is open already.
        """
        if session_id in self._sessions:
            raise GatewayError(
                f"session {session_id!r} is already open", hint="close it, or choose another id"
            )
        session = RemoteSession(
            session_id,
            self._idlest(),
            endpoint=Endpoint(self.url, new_key(), self._setup.model_name),
            on_turn=on_turn,
            on_close=self._forget,
        )
        self._sessions[session_id] = self._keys[session.key] = session
        session.worker.open(
            session, sampling=sampling, limits=limits, wants_turns=on_turn is not None
        )
        return session

    def _idlest(self) -> Worker:
        return min(self._workers, key=lambda one: (not one.serves, len(one.sessions)))

    def _forget(self, session: RemoteSession) -> None:
        del self._sessions[session.id], self._keys[session.key]
        session.worker.sessions.pop(session.id, None)

    def _server_of(self, target: str, headers: Mapping[str, str]) -> Worker:
        """Return who serves a request: where no session answers to its key, anybody refuses it."""
        key = self._routes.key(target, headers)
        session = self._keys.get(key) if key else None
        return session.worker if session else self._idlest()

    async def _start(self) -> None:
        for number in range(self._num_processes):
            self._workers.append(self._new(number))
            self._keepers.append(asyncio.create_task(self._keep(number)))
        first = list(self._workers)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*map(_begun, first))
        except TimeoutError as error:
            raise GatewayError(
                f"the gateway's processes did not serve within {START_S:g} s",
                hint=f"their logs are in {self._setup.log_dir}",
            ) from error

    def _new(self, number: int) -> Worker:
        return Worker(number, self._setup, on_load=self._on_load)

    async def _keep(self, number: int) -> None:
        """Keep a process running: a dead one's place is taken at once, its successor starts."""
        num_failed = 0
        while True:
            worker = self._workers[number]
            problem = "died"
            try:
                await worker.run()
            except OSError as error:  # no memory, no descriptor: there may be some again
                problem = f"could not be started ({error})"
            num_failed = 0 if worker.ready.is_set() else num_failed + 1
            self._workers[number] = await self._successor(number)
            lost = f"{len(worker.sessions)} sessions were lost" if worker.sessions else "none lost"
            told = f"process {number} of the gateway {problem}, {lost}; its log: {worker.log}"
            self._on_death(told)
            await asyncio.sleep(_PAUSES_S[min(num_failed, len(_PAUSES_S) - 1)])

    async def _successor(self, number: int) -> Worker:
        """Return a process that takes orders, once the machine has descriptors for it."""
        while True:
            with suppress(OSError):
                return self._new(number)
            await asyncio.sleep(_PAUSES_S[1])

    async def _end(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for worker in self._workers:
            worker.discard()


async def _begun(worker: Worker) -> None:
    """Wait until a process serves. Raises GatewayError where it ends before."""
    waiting = [asyncio.create_task(event.wait()) for event in (worker.ready, worker.ended)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
    if worker.ready.is_set():
        return
    if worker.error:
        raise GatewayError(str(worker.error), hint=worker.error.hint)
    raise GatewayError(
        f"process {worker.number} of the gateway ended before it served\n{tail(worker.log)}",
        hint=f"its whole log is {worker.log}",
    )
