"""Session: one harness run's traffic through the gateway, with its key, sockets and Trajectory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from swerl.core.contracts import Endpoint
from swerl.core.errors import BudgetError, EngineError
from swerl.core.turn import Trajectory
from swerl.gateway.bodies import Replays
from swerl.gateway.conversation import Conversation, closed

if TYPE_CHECKING:
    from aiohttp import web

_SHUTDOWN_S = 0.5
"""Seconds for the last answers to leave; they are errors, because their Session is closed."""


class Session:
    """One harness run's traffic. Implements Listener."""

    def __init__(
        self,
        session_id: str,
        conversation: Conversation,
        *,
        endpoint: Endpoint,
        server: Callable[[Session], web.Server],
        on_close: Callable[[Session], None],
    ) -> None:
        self.id = session_id
        self.conversation = conversation
        self.key = endpoint.key
        self.url = endpoint.url
        """Base URL of the main port."""
        self.replays = Replays()
        self._model = endpoint.model
        self._server = server
        self._on_close = on_close
        self._listeners: list[tuple[asyncio.Server, web.Server]] = []
        self._closing: asyncio.Task[Trajectory] | None = None

    @property
    def failure(self) -> EngineError | BudgetError | None:
        """Error of the engine's last call; None if it worked."""
        return self.conversation.failure

    @property
    def limit(self) -> str:
        """Name of the SessionLimits field that refused a request, else empty."""
        return self.conversation.admission.reached

    def endpoint(self, url: str) -> Endpoint:
        """Return the address for a harness that reaches this Session at `url`."""
        return Endpoint(url.rstrip("/"), self.key, self._model)

    async def attach(self, sock: socket.socket) -> None:
        """Serve this Session alone on a listening socket; requests on it need no key."""
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
        """Abort pending replies, stop the listeners, and return the tree. Idempotent."""
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
    """Close a server's connections, idle ones at once."""
    server.pre_shutdown()
    await server.shutdown(_SHUTDOWN_S)
