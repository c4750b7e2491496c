"""Session: one harness run's traffic, its key, the sockets that serve it alone, its Trajectory.

A session is served in the process that opened it, or in a gateway process of its own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Protocol

from swerl.core.chat import ChatReply, Message
from swerl.core.contracts import Endpoint
from swerl.core.errors import BudgetError, EngineError, SwerlError
from swerl.core.tree import Trajectory
from swerl.core.turn import Sampling, Turn
from swerl.gateway.answer import closed
from swerl.gateway.limits import SessionLimits
from swerl.gateway.pipeline import Conversation

if TYPE_CHECKING:
    from aiohttp import web

_SHUTDOWN_S = 0.5
"""Seconds for answers under way to leave; they are errors, because the session is closed."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A Turn with the words behind its tokens."""

    turn: Turn
    new_messages: tuple[Message, ...]
    """What the client said since the Turn's parent."""
    reply: ChatReply


def recorder(
    on_turn: Callable[[TurnRecord], None],
) -> Callable[[Turn, Sequence[Message], ChatReply], None]:
    """Adapt a receiver of TurnRecords to what a Conversation calls."""
    return lambda turn, new, reply: on_turn(TurnRecord(turn, tuple(new), reply))


class Session(Protocol):
    """One harness run's traffic. A Listener, wherever it is served."""

    id: str
    key: str
    url: str
    """Where all sessions are served, by key."""

    @property
    def failure(self) -> SwerlError | None:
        """What broke the last call of the engine, or the gateway; None when it worked."""

    @property
    def limit(self) -> str:
        """Name of the SessionLimits field that refused a request; empty while none did."""

    def endpoint(self, url: str) -> Endpoint:
        """Return where a harness finds this session, given its base URL as the harness sees it."""

    async def attach(self, sock: socket.socket) -> None:
        """Serve this session alone on a listening socket; requests on it need no key."""

    async def close(self) -> Trajectory:
        """Abort what is in flight, stop the listeners, and return the tree. Idempotent."""


class SessionSource(Protocol):
    """A gateway: opens sessions and serves them, in this process or in others."""

    url: str

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_turn: Callable[[TurnRecord], None] | None = None,
    ) -> Session:
        """Open a session. Raises GatewayError where one of this id is open already."""


class ServedSession:
    """A session that is served in this process. Implements Session."""

    def __init__(
        self,
        session_id: str,
        conversation: Conversation,
        *,
        endpoint: Endpoint,
        server: Callable[[ServedSession], web.Server],
        on_close: Callable[[ServedSession], None],
    ) -> None:
        self.id = session_id
        self.conversation = conversation
        self.key = endpoint.key
        self.url = endpoint.url
        self._model = endpoint.model
        self._server = server
        self._on_close = on_close
        self._listeners: list[tuple[asyncio.Server, web.Server]] = []
        self._closing: asyncio.Task[Trajectory] | None = None

    @property
    def failure(self) -> EngineError | BudgetError | None:
        """What broke the last call of the engine; None when it worked."""
        return self.conversation.failure

    @property
    def limit(self) -> str:
        """Name of the SessionLimits field that refused a request; empty while none did."""
        return self.conversation.admission.reached

    def endpoint(self, url: str) -> Endpoint:
        """Return where a harness finds this session, given its base URL as the harness sees it."""
        return Endpoint(url.rstrip("/"), self.key, self._model)

    async def attach(self, sock: socket.socket) -> None:
        """Serve this session alone on a listening socket; requests on it need no key."""
        if self._closing:
            sock.close()
            raise closed()
        sock.setblocking(False)
        server = self._server(self)
        listener = await asyncio.get_running_loop().create_server(server, sock=sock)
        self._listeners.append((listener, server))
        if self._closing:
            await self._stop_listening()

    async def close(self) -> Trajectory:
        """Abort what is in flight, stop the listeners, and return the tree. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return await asyncio.shield(self._closing)

    async def _close(self) -> Trajectory:
        trajectory = await self.conversation.close()
        self._on_close(self)
        await self._stop_listening()
        return trajectory

    async def _stop_listening(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener, server in listeners:
            listener.close()
            await end_connections(server)


async def end_connections(server: web.Server) -> None:
    """Close a server's connections, the idle ones at once."""
    server.pre_shutdown()
    await server.shutdown(_SHUTDOWN_S)


def new_key() -> str:
    """Return a key that nobody guesses, in the style of an API key."""
    return f"sk-swerl-{token_urlsafe(24)}"
