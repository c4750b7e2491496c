"""Session: one harness run's traffic through the gateway, with its key, sockets and Trajectory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from swerl.core.contracts import Endpoint
from swerl.core.errors import EngineError
from swerl.core.turn import Trajectory
from swerl.gateway.bodies import Replays
from swerl.gateway.conversation import Conversation, closed

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
        serve: Callable[[Session, socket.socket], Awaitable[Serving]],
        on_close: Callable[[Session], None],
    ) -> None:
        self.id = session_id
        self.conversation = conversation
        self.key = endpoint.key
        self.url = endpoint.url
        """Base URL of the main port."""
        self.replays = Replays()
        self._model = endpoint.model
        self._serve = serve
        self._on_close = on_close
        self._listeners: list[Serving] = []
        self._closing: asyncio.Task[Trajectory] | None = None

    @property
    def failure(self) -> EngineError | None:
        """Error of the engine's last call; None if it worked."""
        return self.conversation.failure

    @property
    def limit(self) -> str:
        """Name of the SessionLimits field that refused a request; empty if none did."""
        return self.conversation.admission.reached

    @property
    def is_used(self) -> bool:
        """True once a request has asked for a reply."""
        return self.conversation.admission.is_used

    def endpoint(self, url: str) -> Endpoint:
        """Return the address for a harness that reaches this Session at `url`."""
        return Endpoint(url.rstrip("/"), self.key, self._model)

    async def attach(self, sock: socket.socket) -> None:
        """Serve only this Session on a listening socket; requests on it need no key."""
        if self._closing:
            sock.close()
            raise closed()
        listener = await self._serve(self, sock)
        if self._closing:
            await listener.end()
            raise closed()
        self._listeners.append(listener)

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
        for listener in listeners:
            await listener.end()


class Serving:
    """A listening socket and its server."""

    def __init__(self, listener: asyncio.Server, server: web.Server) -> None:
        self._listener = listener
        self._server = server

    async def end(self) -> None:
        """Stop listening and close the connections, idle ones at once."""
        self._listener.close()
        self._server.pre_shutdown()
        await self._server.shutdown(_SHUTDOWN_S)
