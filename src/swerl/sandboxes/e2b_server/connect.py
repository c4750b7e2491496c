"""The Connect protocol with its JSON codec: bare messages, or streams of envelopes.

An envelope is one byte of flags, the length as four bytes, and a JSON message; the one that ends
a stream carries flag 2 and, where the call failed, its error.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

import orjson

from swerl.core.chat import Json
from swerl.sandboxes.e2b_server.failure import Code, Failure

if TYPE_CHECKING:
    from aiohttp import web

UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
MAX_MESSAGE_BYTES = 16 << 20
IDLE_S = 60.0
"""Longest wait for a client to send or to take the next bytes."""
_HEADER = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the client lets the call take, or None for as long as it likes."""
    given = headers.get("Connect-Timeout-Ms", "")
    if not given:
        return None
    if not given.isdecimal() or len(given) > 10:
        raise Failure(Code.INVALID_ARGUMENT, f"cannot read the timeout {given[:40]!r}")
    return int(given) / 1000 or None


def keepalive_s(headers: Mapping[str, str]) -> float:
    """Return the silence after which a stream shows that it lives, in seconds."""
    given = headers.get("Keepalive-Ping-Interval", "")
    return max(1.0, float(given)) if given.isdecimal() and len(given) < 6 else 90.0


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Return a request's body, uncompressed. Raises Failure where it is too large or too slow."""
    body = bytearray()
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(IDLE_S):
                body += await request.content.readany()
            if len(body) > max_bytes:
                message = f"the body is larger than {max_bytes} bytes"
                raise Failure(Code.RESOURCE_EXHAUSTED, message, status=413)
    except TimeoutError as error:
        raise Failure(Code.CANCELED, "the body did not arrive", status=408) from error
    return bytes(body)


async def read_message(request: web.BaseRequest) -> dict[str, Json]:
    """Return the message of a unary call."""
    _require_type(request, UNARY_TYPE)
    return _object(await read_body(request, MAX_MESSAGE_BYTES))


async def read_one(request: web.BaseRequest) -> dict[str, Json]:
    """Return the only message of a call whose answer is a stream."""
    try:
        async with asyncio.timeout(IDLE_S):
            async for message in read_stream(request):
                return message
    except TimeoutError as error:
        raise Failure(Code.CANCELED, "the message did not arrive", status=408) from error
    raise Failure(Code.INVALID_ARGUMENT, "the request holds no message")


async def read_stream(request: web.BaseRequest) -> AsyncIterator[dict[str, Json]]:
    """Yield the messages of a client's stream as they arrive."""
    _require_type(request, STREAM_TYPE)
    while True:
        try:
            flags, length = _HEADER.unpack(await request.content.readexactly(_HEADER.size))
            if length > MAX_MESSAGE_BYTES:
                raise Failure(Code.RESOURCE_EXHAUSTED, f"a message of {length} bytes is too large")
            data = await request.content.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Failure(Code.INVALID_ARGUMENT, "the stream breaks off") from error
            return
        if flags & _COMPRESSED:
            raise Failure(Code.UNIMPLEMENTED, "compressed messages are not supported")
        yield _object(data)


class Reply:
    """A stream of messages to a client. Raises ConnectionError where the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, message: Mapping[str, Json]) -> None:
        """Send one message; waits for a client that is slow, and gives up on one that is stuck."""
        await self._send(0, message)

    async def end(self, failure: Failure | None = None) -> web.StreamResponse:
        """End the stream, with an error where the call failed."""
        await self._send(_END, {"error": failure.rpc()} if failure else {})
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _send(self, flags: int, message: Mapping[str, Json]) -> None:
        data = orjson.dumps(message)
        try:
            async with asyncio.timeout(IDLE_S):
                response = await self._open()
                await response.write(_HEADER.pack(flags, len(data)) + data)
        except TimeoutError as error:
            raise ConnectionAbortedError("the client takes nothing any more") from error

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            from aiohttp import web

            self._response = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
            await self._response.prepare(self._request)
        return self._response


def _require_type(request: web.BaseRequest, wanted: str) -> None:
    if request.content_type != wanted:
        message = f"content type {request.content_type!r} is not supported, only {wanted}"
        raise Failure(Code.UNIMPLEMENTED, message, status=415)


def _object(data: bytes) -> dict[str, Json]:
    try:
        value: Json = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise Failure(Code.INVALID_ARGUMENT, f"a message is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Failure(Code.INVALID_ARGUMENT, "a message must be a JSON object")
    return value
