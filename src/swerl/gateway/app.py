"""Gateway: the HTTP service that answers every dialect from one engine.

The main port serves all open sessions by key, and nothing without one; a socket attached to a
session serves it alone.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

from aiohttp import web

from swerl.core.contracts import ChatEngine, Endpoint, Engine, Family
from swerl.core.errors import GatewayError
from swerl.core.events import ignore
from swerl.core.experts import ExpertSpool
from swerl.core.turn import Sampling
from swerl.gateway.connections import Server
from swerl.gateway.intake import Bounds, Intake
from swerl.gateway.limits import SessionLimits
from swerl.gateway.pipeline import Conversation
from swerl.gateway.pulse import OnLoad, Pulse
from swerl.gateway.router import OnRefused, Router
from swerl.gateway.sessions import ServedSession, TurnRecord, end_connections, new_key, recorder
from swerl.gateway.speakers import HistoryPolicy, speaker

if TYPE_CHECKING:
    from types import TracebackType

HOST = "127.0.0.1"
_BACKLOG = 1024
_BOUNDS = Bounds()
_MOST_CONNECTIONS = 256
"""Connections to a session's own socket: an agent and its sub-agents hold a few."""
_MOST_CONNECTIONS_OF_ALL = 8192
"""Connections to the main port: a few for each of a thousand sessions."""


class Gateway:
    """Answers agents from an engine and records exact tokens, session by session."""

    def __init__(
        self,
        *,
        engine: Engine | ChatEngine,
        family: Family,
        model_name: str = "swerl",
        host: str | None = HOST,
        port: int = 0,
        history: HistoryPolicy = HistoryPolicy.EXACT,
        bounds: Bounds = _BOUNDS,
        on_refused: OnRefused | None = None,
        on_load: OnLoad | None = None,
        process: int = 0,
        spool: ExpertSpool | None = None,
    ) -> None:
        """Serve on `host`, or nowhere but where `take` and sessions are given sockets.

        `on_refused` is told of each request that ends in an error, `on_load` now and then how busy
        this process is, whose number is `process`. Experts that the engine records go to `spool`;
        they stay in memory where there is none.
        """
        self.url = ""
        self._engine = engine
        self._family = family
        self._model_name = model_name
        self._host = host
        self._port = port
        self._history = history
        self._spool = spool
        self._intake = Intake(bounds)
        self._router = Router(model_name, self._intake, on_refused)
        self._sessions: dict[str, ServedSession] = {}
        self._pulse = Pulse(
            self._intake, lambda: len(self._sessions), on_load or ignore, process=process
        )
        self._server = self._make_server(None)
        self._passing = Server(
            partial(self._router.handle, None),
            self._router.on_break,
            most=_MOST_CONNECTIONS_OF_ALL,
            once=True,
        )
        """Serves connections that were accepted elsewhere."""
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        if self._host is not None:
            listening = listen(self._host, self._port)
            self.url = url_of(self._host, listening)
            self._listener = await asyncio.get_running_loop().create_server(
                self._server, sock=listening, backlog=_BACKLOG
            )
        self._pulse.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        await self._pulse.stop()
        if self._listener:
            self._listener.close()
        for server in (self._server, self._passing):
            await end_connections(server)

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_turn: Callable[[TurnRecord], None] | None = None,
        key: str | None = None,
    ) -> ServedSession:
        """Open a session: only an open session is served.

        It answers to `key`, which an earlier session loses by it, or to a fresh one. Raises
        GatewayError where a session of this id is open already.
        """
        if session_id in self._sessions:
            raise GatewayError(
                f"session {session_id!r} is already open", hint="close it, or choose another id"
            )
        conversation = Conversation(
            session_id,
            speaker(self._engine, self._family, session_id, self._history, self._spool),
            sampling=sampling,
            limits=limits,
            on_delivered=recorder(on_turn) if on_turn else None,
        )
        session = ServedSession(
            session_id,
            conversation,
            endpoint=Endpoint(self.url, key or new_key(), self._model_name),
            server=self._make_server,
            on_close=self._forget,
        )
        self._router.sessions[session.key] = session
        self._sessions[session_id] = session
        return session

    async def take(self, sock: socket.socket, first: bytes) -> None:
        """Serve a connection that was accepted elsewhere, and the `first` bytes that it brought.

        It is served for one request: the next one may be for a session of another process.
        """
        connection = self._passing()
        connection.begin_with(first)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)

    def _forget(self, session: ServedSession) -> None:
        if self._router.sessions.get(session.key) is session:
            del self._router.sessions[session.key]
        del self._sessions[session.id]

    def _make_server(self, session: ServedSession | None) -> web.Server:
        """Return a server of all sessions, or of one alone."""
        handler = partial(self._router.handle, session)
        most = _MOST_CONNECTIONS if session else _MOST_CONNECTIONS_OF_ALL
        return Server(handler, self._router.on_break, most=most)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises GatewayError where the address is not to be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # which repeats the address
        message = f"cannot listen on {host}:{port}: {reason}"
        hint = "set the port to 0 to get a free one, or stop what uses it"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            hint = "name an address of this machine, such as 127.0.0.1"
        raise GatewayError(message, hint=hint) from error


def url_of(host: str, listening: socket.socket) -> str:
    """Return where a client on this machine reaches a socket that listens on `host`."""
    name = HOST if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"
