"""HTTP: the connections of a listening socket, request bodies, and answers.

A connection without a request holds nothing but itself, also if it sends one byte a minute. When
there are too many, the one that was idle for longest is closed.
"""

from __future__ import annotations

import asyncio
import re
import uuid
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import GatewayError, Refusal

if TYPE_CHECKING:
    from swerl.core.contracts import WireReply

BODY_S = 120.0
"""Seconds for a body to arrive. Agents are near; the largest bodies take a few."""
PING = b": ping\n\n"
"""A comment, which every reader of server-sent events skips."""

_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)
"""An escape in JSON text: a pair of surrogates, a lone surrogate, or any other."""
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's `wbits` for each content encoding."""

_Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Server(web.Server):
    """Serves connections, and reports one that breaks after its last answer.

    A client that leaves cancels its answer (`handler_cancellation`).
    """

    def __init__(
        self,
        handler: _Handler,
        on_break: MutableMapping[web.RequestHandler, Callable[[], None]],
        *,
        most: int,
    ) -> None:
        """Serve at most `most` connections at once.

        `on_break` holds a callback by connection; an entry lasts until the next request.
        """
        super().__init__(self._handle, handler_cancellation=True)
        self._handler = handler
        self._on_break = on_break
        self._most = most
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}
        """Connections without a request, the longest idle first."""

    def __call__(self) -> AgentConnection:
        """Return the handler of a new connection. `read_object` decompresses bodies."""
        loop = asyncio.get_running_loop()
        return AgentConnection(self, loop=loop, access_log=None, auto_decompress=False)  # type: ignore[arg-type]  # None is no log

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection; over the cap the longest idle one is closed, or else this one."""
        super().connection_made(handler, transport)
        self._idle[handler] = transport
        if len(self.connections) > self._most:
            oldest = next(iter(self._idle))
            self._idle.pop(oldest).abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Forget a connection; one that ends with an error left bytes unread."""
        self._idle.pop(handler, None)
        callback = self._on_break.pop(handler, None)
        if callback and exc:
            callback()
        super().connection_lost(handler, exc)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._on_break.pop(connection, None)
        transport = self._idle.pop(connection, None)
        try:
            return await self._handler(request)
        finally:
            if transport and not transport.is_closing():
                self._idle[connection] = transport


class AgentConnection(web.RequestHandler):
    """One connection. Malformed HTTP is answered with an error that both vendors' SDKs parse."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are no request, and close. Raises ConnectionError."""
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        text = "the request is not valid HTTP" if status < 500 else "internal error"
        kind = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": kind, "message": text, "param": None, "code": None}
        body = orjson.dumps({"type": "error", "error": error})
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytearray:
    """Return a request's raw body. Raises GatewayError if it is too large or too slow."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        raise GatewayError(f"the request body did not arrive within {BODY_S:g} s") from error
    except web.RequestPayloadError as error:
        raise GatewayError(f"the request body cannot be read: {error}") from error
    return body


def read_object(body: bytearray, encoding: str, max_bytes: int) -> dict[str, Json]:
    """Return the JSON object in a body with this `Content-Encoding`.

    Raises GatewayError if it is too large, no JSON, or no object.
    """
    plain = _decompressed(body, encoding, max_bytes)
    try:
        value = _parsed(plain)
    except orjson.JSONDecodeError as error:
        raise GatewayError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise GatewayError(f"the request body must be a JSON object, not {type(value).__name__}")
    return value


def _parsed(body: bytes | bytearray) -> Json:
    """Parse JSON; a lone surrogate becomes the replacement character.

    Agents cut tool results at a length. A cut inside an emoji leaves half of a surrogate pair,
    which JavaScript writes as a lone escape. A refusal would end the agent's run.
    """
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        fixed = _ESCAPE.sub(lambda at: rb"\ufffd" if at["half"] else at[0], body)
        if fixed == body:
            raise
        value = orjson.loads(fixed)
    return value


def _decompressed(body: bytearray, encoding: str, max_bytes: int) -> bytes | bytearray:
    """Undo a `Content-Encoding`; stop at the cap, so that a small body cannot fill the memory."""
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case ("gzip" | "x-gzip" | "deflate") as name:
            plain = _inflated(body, name, max_bytes + 1)
        case "zstd":
            plain = _unzstd(body, max_bytes + 1)
        case other:
            raise GatewayError(
                f"the body's encoding {other!r} is not known: send gzip, deflate or zstd"
            )
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    return plain


def _inflated(body: bytearray, name: str, most: int) -> bytes:
    decompressor = zlib.decompressobj(_WBITS[name])
    try:
        plain = decompressor.decompress(body, most)
    except zlib.error as error:
        raise GatewayError(f"the request body cannot be read as {name}") from error
    if len(plain) < most and not decompressor.eof:
        raise GatewayError(f"the request body cannot be read as {name}")
    return plain


def _unzstd(body: bytearray, most: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise GatewayError(
            "the body is packed with zstd, which this gateway cannot read: send gzip",
            hint="pip install zstandard",
        ) from error
    library: Any = zstandard
    try:
        with library.ZstdDecompressor(max_window_size=2**27).stream_reader(BytesIO(body)) as reader:
            plain: bytes = reader.read(most)
    except library.ZstdError as error:
        raise GatewayError("the request body cannot be read as zstd") from error
    return plain


def _too_large(max_bytes: int) -> GatewayError:
    message = f"the request is larger than {max_bytes} bytes"
    return GatewayError(message, refusal=Refusal.TOO_LARGE)


async def send(request: web.BaseRequest, reply: WireReply) -> web.StreamResponse:
    """Send a whole answer. Raises ConnectionError if the client is gone."""
    headers = {**reply.headers, **_request_id()}
    response = web.Response(status=reply.status, headers=headers, body=reply.body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def send_json(request: web.BaseRequest, value: Json) -> web.StreamResponse:
    """Send a JSON answer. Raises ConnectionError if the client is gone."""
    response = web.Response(
        body=orjson.dumps(value), content_type="application/json", headers=_request_id()
    )
    await response.prepare(request)
    await response.write_eof()
    return response


class EventStream:
    """Server-sent events. Raises ConnectionError if the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """True once the status line was sent; an error is an event from then on."""
        return self._response is not None

    async def ping(self) -> None:
        """Show the client that the answer is still pending."""
        await (await self._open()).write(PING)

    async def finish(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send the events in one write, and end the stream."""
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
            headers |= _request_id()
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response


def _request_id() -> dict[str, str]:
    """Return the headers in which the vendors' clients look for a request id to show in errors."""
    name = f"req_{uuid.uuid4().hex}"
    return {"request-id": name, "x-request-id": name}
