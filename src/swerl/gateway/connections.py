"""The connections of one listening socket: how many there are, and what becomes of broken ones.

A connection that sends no request, or one letter a minute, holds nothing but itself; when there are
too many, the one that was idle for longest makes room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import orjson
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage

_Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_Told: TypeAlias = Callable[[], None]


class Connection(web.RequestHandler):
    """One connection. What is no HTTP is answered in a shape that both vendors' clients read."""

    _first = b""

    def begin_with(self, first: bytes) -> None:
        """Read these bytes before those that the connection brings: others have read them."""
        self._first = first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve."""
        super().connection_made(transport)
        if self._first:
            self.data_received(self._first)
            self._first = b""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be read as a request, and close. Raises ConnectionError."""
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        text = "the request is not valid HTTP" if status < 500 else "internal error"
        kind = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": kind, "message": text, "param": None, "code": None}
        body = orjson.dumps({"type": "error", "error": error})
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response


class Server(web.Server):
    """Serves connections, and says when one breaks under the last answer that went over it.

    With `handler_cancellation` a client that goes away cancels its answer.
    """

    def __init__(
        self,
        handler: _Handler,
        on_break: MutableMapping[web.RequestHandler, _Told],
        *,
        most: int,
        once: bool = False,
    ) -> None:
        """Serve `most` connections at once, each for one request only where `once` says so.

        `on_break` says whom to tell, by connection; an entry lasts until the next request.
        """
        super().__init__(
            self._handle,
            request_factory=self._only_request if once else None,
            handler_cancellation=True,
        )
        self._handler = handler
        self._on_break = on_break
        self._most = most
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}
        """Connections without a request under way, the longest idle first."""

    def __call__(self) -> Connection:
        """Return what handles a new connection. Bodies are unpacked where they are read."""
        loop = asyncio.get_running_loop()
        return Connection(self, loop=loop, access_log=None, auto_decompress=False)  # type: ignore[arg-type]  # None is no log

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Take a connection in; over the cap the longest idle one goes, or else this one."""
        super().connection_made(handler, transport)
        self._idle[handler] = transport
        if len(self.connections) > self._most:
            oldest = next(iter(self._idle))
            self._idle.pop(oldest).abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Forget a connection. One that ends with an error left something unread."""
        self._idle.pop(handler, None)
        told = self._on_break.pop(handler, None)
        if told and exc:
            told()
        super().connection_lost(handler, exc)

    def _only_request(self, message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        """Return a request whose answer says that it is the connection's last."""
        return self._make_request(message._replace(should_close=True), *rest)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._on_break.pop(connection, None)
        transport = self._idle.pop(connection, None)
        try:
            return await self._handler(request)
        finally:
            if transport and not transport.is_closing():
                self._idle[connection] = transport
