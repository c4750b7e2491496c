"""A process of the gateway as its controller sees it, and the sessions that it serves.

When the process dies its sessions are lost: each has a failure, so that its Episode is `infra`, and
the tokens that were sampled in it are counted as dropped.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from swerl.core.contracts import Endpoint
from swerl.core.errors import GatewayError, SwerlError
from swerl.core.events import GatewayLoad
from swerl.core.tree import Trajectory
from swerl.core.turn import Sampling
from swerl.engines._process import child
from swerl.gateway.limits import SessionLimits
from swerl.gateway.orders import (
    Attach,
    Begin,
    Broken,
    Close,
    Done,
    Open,
    Order,
    Ready,
    Report,
    Take,
    Told,
    Unframer,
    WorkerSetup,
    pack,
)
from swerl.gateway.pulse import OnLoad
from swerl.gateway.sessions import TurnRecord

_MOST_PENDING = 4096
"""Connections that wait to be handed over; more are closed, and their clients come again."""


class RemoteSession:
    """A session that a process of the gateway serves. Implements Session."""

    def __init__(
        self,
        session_id: str,
        worker: Worker,
        *,
        endpoint: Endpoint,
        on_turn: Callable[[TurnRecord], None] | None,
        on_close: Callable[[RemoteSession], None],
    ) -> None:
        self.id = session_id
        self.key = endpoint.key
        self.url = endpoint.url
        self.worker = worker
        self.failure: SwerlError | None = None
        self.limit = ""
        self._model = endpoint.model
        self._on_turn = on_turn
        self._on_close = on_close
        self._num_tokens = 0
        self._closing: asyncio.Task[Trajectory] | None = None

    def endpoint(self, url: str) -> Endpoint:
        """Return where a harness finds this session, given its base URL as the harness sees it."""
        return Endpoint(url.rstrip("/"), self.key, self._model)

    async def attach(self, sock: socket.socket) -> None:
        """Serve this session alone on a listening socket, which goes to its process."""
        await self.worker.ask(lambda ticket: Attach(ticket, self.id), sock)

    async def close(self) -> Trajectory:
        """Abort what is in flight, stop the listeners, and return the tree. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return await asyncio.shield(self._closing)

    def hear(self, told: Told) -> None:
        """Take in what became of a request."""
        self.limit, self.failure = told.limit, told.failure
        self._num_tokens += told.num_tokens
        if told.record and self._on_turn:
            self._on_turn(told.record)

    def lose(self, error: GatewayError) -> None:
        """Note that the process is gone."""
        self.failure = error

    async def _close(self) -> Trajectory:
        try:
            trajectory: object = await self.worker.ask(lambda ticket: Close(ticket, self.id))
            assert isinstance(trajectory, Trajectory)
            return trajectory
        except GatewayError as error:
            self.lose(error)
            dropped = {"gateway process lost": self._num_tokens} if self._num_tokens else {}
            return Trajectory(self.id, dropped=dropped)
        finally:
            self._on_close(self)


class Worker:
    """One process, from before its start to its end. Orders wait until it takes them."""

    def __init__(self, number: int, setup: WorkerSetup, *, on_load: OnLoad) -> None:
        self.number = number
        self.log = setup.log_dir / f"gateway-{number}.log"
        self.sessions: dict[str, RemoteSession] = {}
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.pid = 0
        """Its id, once it is ready."""
        self.error: SwerlError | None = None
        """Why it could not begin."""
        self._on_load = on_load
        self._tickets: dict[int, asyncio.Future[object]] = {}
        self._numbers = count()
        self._pending: deque[tuple[bytes, socket.socket | None]] = deque()
        self._orders, self._its_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reports, self._its_reports = socket.socketpair()
        self._orders.setblocking(False)
        self.send(Begin(number, setup))

    @property
    def serves(self) -> bool:
        """Whether it has begun and not ended."""
        return self.ready.is_set() and not self.ended.is_set()

    async def run(self) -> None:
        """Be its parent until it ends; cancelling ends it. Raises OSError where none starts."""
        theirs = (self._its_orders, self._its_reports)
        numbers = [sock.fileno() for sock in theirs]
        command = [sys.executable, "-m", "swerl.gateway.process", *map(str, numbers)]
        loop = asyncio.get_running_loop()
        try:
            async with child(command, self.log, pass_fds=numbers):
                for sock in theirs:
                    sock.close()
                transport, _ = await loop.connect_accepted_socket(
                    lambda: _Reader(self._hear, self.ended.set), self._reports
                )
                try:
                    await self.ended.wait()
                finally:
                    transport.close()
        finally:
            self.discard()

    def open(
        self,
        session: RemoteSession,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        wants_turns: bool,
    ) -> None:
        """Let it serve a session."""
        self.sessions[session.id] = session
        self.send(Open(session.id, session.key, sampling, limits, wants_turns))

    def hand_over(self, connection: socket.socket, first: bytes) -> None:
        """Let it serve a connection, of which these bytes were read."""
        if len(self._pending) >= _MOST_PENDING or self.ended.is_set():
            connection.close()
        else:
            self.send(Take(first), connection)

    async def ask(self, order: Callable[[int], Order], sock: socket.socket | None = None) -> object:
        """Give an order and return what came of it. Raises GatewayError where the process dies."""
        if self.ended.is_set():
            if sock:
                sock.close()
            raise self._gone()
        ticket = next(self._numbers)
        self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self.send(order(ticket), sock)
        try:
            return await self._tickets[ticket]
        finally:
            del self._tickets[ticket]

    def send(self, order: Order, sock: socket.socket | None = None) -> None:
        """Give an order, with a socket that becomes the process's own."""
        self._pending.append((pack(order), sock))
        if len(self._pending) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            data, sock = self._pending[0]
            try:
                socket.send_fds(self._orders, [data], [sock.fileno()] if sock else [])
            except BlockingIOError:
                loop.add_writer(self._orders, self._flush)
                return
            except OSError:  # it died; whoever waits for it hears of that when its reports end
                pass
            self._pending.popleft()
            if sock:
                sock.close()
        loop.remove_writer(self._orders)

    def _hear(self, report: Report) -> None:
        match report:
            case Ready(pid):
                self.pid = pid
                self.ready.set()
            case Broken(error):
                self.error = error
            case Told(name) if name in self.sessions:
                self.sessions[name].hear(report)
            case GatewayLoad():
                self._on_load(report)
            case Done(ticket, value, error):
                waiting = self._tickets.get(ticket)
                if waiting and not waiting.done():
                    if error:
                        waiting.set_exception(error)
                    else:
                        waiting.set_result(value)

    def discard(self) -> None:
        """Close what is left and tell everybody who waits."""
        self.ended.set()
        with suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_writer(self._orders)
        for sock in (self._orders, self._reports, self._its_orders, self._its_reports):
            sock.close()
        for _, held in self._pending:
            if held:
                held.close()
        self._pending.clear()
        for session in self.sessions.values():
            session.lose(self._gone())
        for waiting in self._tickets.values():
            if not waiting.done():
                waiting.set_exception(self._gone())

    def _gone(self) -> GatewayError:
        message = f"process {self.number} of the gateway died, and this session with it"
        return GatewayError(message, hint=f"its log is {self.log}")


class _Reader(asyncio.Protocol):
    """Reads reports as they come, so that a session's state is never behind its harness's exit."""

    def __init__(self, hear: Callable[[Report], None], ended: Callable[[], None]) -> None:
        self._unframer = Unframer()
        self._hear = hear
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        for report in self._unframer.feed(data):
            self._hear(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


def tail(log: Path, num_lines: int = 8) -> str:
    """Return the end of a process's log."""
    with suppress(FileNotFoundError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
    return ""
