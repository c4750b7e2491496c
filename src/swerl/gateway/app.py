"""Gateway: the HTTP service that answers every dialect from one engine.

The main port serves all open sessions by key, and nothing without one; a socket attached to a
session serves it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

from aiohttp import web

from swerl.errors import GatewayError
from swerl.gateway.connections import Server
from swerl.gateway.limits import SessionLimits
from swerl.gateway.pipeline import Conversation
from swerl.gateway.router import OnRefused, Router
from swerl.gateway.sessions import Session, TurnRecord, new_key, recorder, stop_serving
from swerl.gateway.speakers import HistoryPolicy, speaker
from swerl.interfaces import ChatEngine, Endpoint, Engine, Family
from swerl.turn import Sampling

if TYPE_CHECKING:
    from types import TracebackType

HOST = "127.0.0.1"
_BACKLOG = 1024
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
        host: str = HOST,
        port: int = 0,
        history: HistoryPolicy = HistoryPolicy.EXACT,
        on_refused: OnRefused | None = None,
    ) -> None:
        """Serve on `host`; `on_refused` is told of each request that ends in an error."""
        self.url = ""
        self._engine = engine
        self._family = family
        self._model_name = model_name
        self._host = host
        self._port = port
        self._history = history
        self._router = Router(model_name, on_refused)
        self._session_ids: set[str] = set()
        self._server = self._make_server(None)
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._server, self._host, self._port, backlog=_BACKLOG
            )
        except OSError as error:
            message = f"cannot listen on {self._host}:{self._port}: {error.strerror}"
            hint = "leave the port at 0 to get a free one, or stop what uses it"
            raise GatewayError(message, hint=hint) from error
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://{_reachable(self._host)}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in list(self._router.sessions.values()):
            await session.close()
        if self._listener:
            await stop_serving(self._listener, self._server)

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_turn: Callable[[TurnRecord], None] | None = None,
        key: str | None = None,
    ) -> Session:
        """Open a session: only an open session is served.

        It answers to `key`, which an earlier session loses by it, or to a fresh one. Raises
        GatewayError where a session of this id is open already.
        """
        if session_id in self._session_ids:
            message = f"session {session_id!r} is already open"
            raise GatewayError(message, hint="close it, or choose another id")
        conversation = Conversation(
            session_id,
            speaker(self._engine, self._family, session_id, self._history),
            sampling=sampling,
            limits=limits,
            on_delivered=recorder(on_turn) if on_turn else None,
        )
        session = Session(
            session_id,
            conversation,
            endpoint=Endpoint(self.url, key or new_key(), self._model_name),
            server=self._make_server,
            on_close=self._forget,
        )
        self._router.sessions[session.key] = session
        self._session_ids.add(session_id)
        return session

    def _forget(self, session: Session) -> None:
        if self._router.sessions.get(session.key) is session:
            del self._router.sessions[session.key]
        self._session_ids.discard(session.id)

    def _make_server(self, session: Session | None) -> web.Server:
        """Return a server of all sessions, or of one alone."""
        handler = partial(self._router.handle, session)
        most = _MOST_CONNECTIONS if session else _MOST_CONNECTIONS_OF_ALL
        return Server(handler, self._router.on_break, most=most)


def _reachable(host: str) -> str:
    """Return how a client on this machine names the address that is listened on."""
    if host in ("0.0.0.0", "::", ""):
        return HOST
    return f"[{host}]" if ":" in host else host
