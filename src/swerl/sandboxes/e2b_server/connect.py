"""The Connect protocol with its JSON codec: bare messages, or streams of envelopes.

An envelope is one byte of flags, the length in four bytes, and a JSON message. The last one of a
stream has flag 2, and the error if the call failed. A field of the wrong type is the client's
mistake: the `get_` functions raise WireError.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import struct
from collections.abc import AsyncIterator, Mapping

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.sandboxes.e2b_server.failure import Code, WireError

UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
MAX_MESSAGE_BYTES = 4 << 20
"""Largest message: the worst 4 MiB of JSON take 0.1 s to parse."""
IDLE_S = 60.0
"""Longest wait for a client to send or to accept the next bytes."""
_MAX_TEXTS = 10_000
"""Largest number of texts in a list or table; Linux starts no command with 2 MiB of them."""
_HEADER = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
Message = Mapping[str, Json]


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the time limit that the client set for the call, or None for no limit."""
    text = headers.get("Connect-Timeout-Ms", "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 10:
        raise WireError(Code.INVALID_ARGUMENT, f"cannot read the timeout {text[:40]!r}")
    return int(text) / 1000 or None


def keepalive_s(headers: Mapping[str, str]) -> float:
    """Return the silence after which a stream sends a keep-alive, in seconds."""
    text = headers.get("Keepalive-Ping-Interval", "")
    return max(1.0, float(text)) if text.isdecimal() and len(text) < 6 else 90.0


async def read_pieces(request: web.BaseRequest, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield a request's body, uncompressed, as it arrives.

    Raises WireError if it is larger than `max_bytes`, or if the client stalls.
    """
    size = 0
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes)
    while not request.content.at_eof():
        try:
            async with asyncio.timeout(IDLE_S):
                piece = await request.content.readany()
        except TimeoutError as error:
            raise WireError(Code.CANCELED, "the body did not arrive", status=408) from error
        size += len(piece)
        if size > max_bytes:
            raise too_large(max_bytes)
        yield piece


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Return a request's body. Raises WireError as `read_pieces` does."""
    body = bytearray()
    async for piece in read_pieces(request, max_bytes):
        body += piece
    return bytes(body)


async def read_message(request: web.BaseRequest) -> dict[str, Json]:
    """Return the message of a unary call."""
    _require_type(request, UNARY_TYPE)
    return parse_object(await read_body(request, MAX_MESSAGE_BYTES))


async def read_one(request: web.BaseRequest) -> dict[str, Json]:
    """Return the only message of a call whose answer is a stream."""
    _require_type(request, STREAM_TYPE)
    try:
        async with asyncio.timeout(IDLE_S):
            flags, length = _HEADER.unpack(await request.content.readexactly(_HEADER.size))
            if length > MAX_MESSAGE_BYTES:
                raise too_large(MAX_MESSAGE_BYTES)
            data = await request.content.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise WireError(Code.INVALID_ARGUMENT, "the message is cut short") from error
    except TimeoutError as error:
        raise WireError(Code.CANCELED, "the message did not arrive", status=408) from error
    if flags & _COMPRESSED:
        raise WireError(Code.UNIMPLEMENTED, "compressed messages are not supported")
    return parse_object(data)


def parse_object(data: bytes) -> dict[str, Json]:
    """Return a JSON object; empty if there is no data."""
    try:
        value: Json = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise WireError(Code.INVALID_ARGUMENT, f"a message is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(Code.INVALID_ARGUMENT, "a message must be a JSON object")
    return value


class RpcStream:
    """A stream of messages to a client. Raises ConnectionError if the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, message: Message) -> None:
        """Send one message. Waits for a slow client, and raises for one that accepts nothing."""
        await self._send(0, message)

    async def end(self, failure: WireError | None = None) -> web.StreamResponse:
        """End the stream, with an error if the call failed."""
        await self._send(_END, {"error": failure.rpc()} if failure else {})
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _send(self, flags: int, message: Message) -> None:
        data = orjson.dumps(message)
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
        try:
            async with asyncio.timeout(IDLE_S):
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                await self._response.write(_HEADER.pack(flags, len(data)) + data)
        except TimeoutError as error:
            raise ConnectionAbortedError("the client accepts no more data") from error


def get_text(message: Message, name: str) -> str:
    """Return a text; empty if it is absent."""
    value = message.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(name, "a text without NUL characters")
    return value


def get_integer(message: Message, name: str, default: int = 0) -> int:
    """Return a whole number, which JSON may also carry as a text."""
    value = message.get(name)
    if value is None:
        return default
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "a whole number")
    return value


def get_texts(message: Message, name: str) -> list[str]:
    """Return a list of texts; empty if it is absent."""
    value = message.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MAX_TEXTS:
        raise _wrong(name, f"a list of at most {_MAX_TEXTS} texts")
    return [get_text({name: item}, name) for item in value]


def get_table(message: Message, name: str) -> dict[str, str]:
    """Return an object of texts; empty if it is absent."""
    table = get_object(message, name)
    if len(table) > _MAX_TEXTS:
        raise _wrong(name, f"an object of at most {_MAX_TEXTS} texts")
    return {key: get_text(table, key) for key in table}


def get_object(message: Message, name: str) -> Message:
    """Return an object inside a message; empty if it is absent."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    return value


def get_bytes(message: Message, name: str) -> bytes:
    """Return bytes, which JSON carries in base64, in either alphabet."""
    text = get_text(message, name)
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/") + "==")
    except binascii.Error as error:
        raise _wrong(name, "base64") from error


def too_large(max_bytes: int) -> WireError:
    """Return the refusal of a body or file that is larger than this."""
    message = f"the data is larger than {max_bytes} bytes"
    return WireError(Code.RESOURCE_EXHAUSTED, message, status=413)


def _require_type(request: web.BaseRequest, content_type: str) -> None:
    if request.content_type != content_type:
        message = f"content type {request.content_type!r} is not supported, only {content_type}"
        raise WireError(Code.UNIMPLEMENTED, message, status=415)


def _wrong(name: str, form: str) -> WireError:
    return WireError(Code.INVALID_ARGUMENT, f"field {name!r} must be {form}")
