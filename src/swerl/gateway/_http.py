"""Reading requests and writing answers over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, TypeAlias

import orjson
from aiohttp import web

from swerl.chat import Json
from swerl.errors import GatewayError, Refusal

if TYPE_CHECKING:
    from swerl.interfaces import WireReply

Connection: TypeAlias = web.RequestHandler
_Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_Told: TypeAlias = Callable[[], None]

PING = b": ping\n\n"
"""A comment: every reader of server-sent events skips it."""


async def read_object(request: web.BaseRequest, max_bytes: int) -> dict[str, Json]:
    """Return the JSON object in a request's body.

    Raises GatewayError where it is too large, no JSON, or no object.
    """
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                message = f"the request is larger than {max_bytes} bytes"
                raise GatewayError(message, refusal=Refusal.TOO_LARGE)
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = f"the request body is not valid JSON: {error}"
        raise GatewayError(message) from error
    except web.RequestPayloadError as error:
        message = f"the request body cannot be read: {error}"
        raise GatewayError(message) from error
    if not isinstance(value, dict):
        message = f"the request body must be a JSON object, not {type(value).__name__}"
        raise GatewayError(message)
    return value


async def send(request: web.BaseRequest, reply: WireReply) -> web.StreamResponse:
    """Send a whole answer. Raises ConnectionError where the client is gone."""
    response = web.Response(status=reply.status, headers=dict(reply.headers), body=reply.body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def send_json(request: web.BaseRequest, value: Json) -> web.StreamResponse:
    """Send a JSON answer."""
    response = web.Response(body=orjson.dumps(value), content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    return response


class EventStream:
    """Server-sent events. Raises ConnectionError where the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """Whether the status line is out; from there on an error is an event."""
        return self._response is not None

    async def ping(self) -> None:
        """Show the client that the answer is still being made."""
        await (await self._open()).write(PING)

    async def finish(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send the events, all in one piece, and end the stream."""
        response = await self._open()
        await response.write(b"".join(events))
        await response.write_eof()
        return response

    async def fail(self, error: WireReply) -> web.StreamResponse:
        """End the stream with an error event."""
        return await self.finish([b"event: error\ndata: " + error.body + b"\n\n"])

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response


class Server(web.Server):
    """Serves connections, and says when one breaks under the last answer that went over it.

    With `handler_cancellation` a client that goes away cancels its answer.
    """

    def __init__(self, handler: _Handler, on_break: MutableMapping[Connection, _Told]) -> None:
        """`on_break` says whom to tell, by connection; an entry lasts until the next request."""
        super().__init__(self._handle, handler_cancellation=True, access_log=None)
        self._handler = handler
        self._on_break = on_break

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._on_break.pop(request.protocol, None)
        return await self._handler(request)

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Forget a connection. One that ends with an error left something unread."""
        told = self._on_break.pop(handler, None)
        if told and exc:
            told()
        super().connection_lost(handler, exc)
