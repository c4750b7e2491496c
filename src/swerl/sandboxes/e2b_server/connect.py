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
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import islice
from typing import TypeVar

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.sandboxes.e2b_server.failure import Code, WireError

UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
MAX_MESSAGE_BYTES = 16 << 20
IDLE_S = 60.0
"""Longest wait for a client to send or to accept the next bytes."""
_LONG = 1 << 16
"""Bytes or characters from which work on an input is done in a thread."""
_MOST_SIGNS, _SIGNS = 1 << 18, (b",", b"[", b"{")
"""Bound of signs that come with JSON values: 16 MiB of empty lists would take 1.7 s to parse."""
_MOST_TEXTS, _MOST_BYTES = 10_000, 1 << 22
"""Bounds of a list or table of texts. Linux starts no command with 2 MiB of them."""
_HEADER = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
Message = Mapping[str, Json]
Made = TypeVar("Made")


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the time limit that the client set for the call, or None for no limit."""
    given = headers.get("Connect-Timeout-Ms", "")
    if not given:
        return None
    if not given.isdecimal() or len(given) > 10:
        raise WireError(Code.INVALID_ARGUMENT, f"cannot read the timeout {given[:40]!r}")
    return int(given) / 1000 or None


def keepalive_s(headers: Mapping[str, str]) -> float:
    """Return the silence after which a stream sends a keep-alive, in seconds."""
    given = headers.get("Keepalive-Ping-Interval", "")
    return max(1.0, float(given)) if given.isdecimal() and len(given) < 6 else 90.0


async def off_loop(size: int, work: Callable[..., Made], *args: object) -> Made:
    """Return `work(*args)`, done in a thread if the size of its input would hold the loop up."""
    return work(*args) if size < _LONG else await asyncio.to_thread(work, *args)


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Return a request's body, uncompressed. Raises WireError if it is too large or too slow."""
    body = bytearray()
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(IDLE_S):
                body += await request.content.readany()
            if len(body) > max_bytes:
                message = f"the body is larger than {max_bytes} bytes"
                raise WireError(Code.RESOURCE_EXHAUSTED, message, status=413)
    except TimeoutError as error:
        raise WireError(Code.CANCELED, "the body did not arrive", status=408) from error
    return await off_loop(len(body), bytes, body)


async def read_object(request: web.BaseRequest, max_bytes: int) -> dict[str, Json]:
    """Return the JSON object in a request's body; empty if there is no body."""
    body = await read_body(request, max_bytes)
    return await off_loop(len(body), _object, body)


async def read_message(request: web.BaseRequest) -> dict[str, Json]:
    """Return the message of a unary call."""
    _require_type(request, UNARY_TYPE)
    return await read_object(request, MAX_MESSAGE_BYTES)


async def read_one(request: web.BaseRequest) -> dict[str, Json]:
    """Return the only message of a call whose answer is a stream."""
    try:
        async with asyncio.timeout(IDLE_S):
            async for message in read_stream(request):
                return message
    except TimeoutError as error:
        raise WireError(Code.CANCELED, "the message did not arrive", status=408) from error
    raise WireError(Code.INVALID_ARGUMENT, "the request has no message")


async def read_stream(request: web.BaseRequest) -> AsyncIterator[dict[str, Json]]:
    _require_type(request, STREAM_TYPE)
    while True:
        try:
            flags, length = _HEADER.unpack(await request.content.readexactly(_HEADER.size))
            if length > MAX_MESSAGE_BYTES:
                raise WireError(
                    Code.RESOURCE_EXHAUSTED, f"a message of {length} bytes is too large"
                )
            data = await request.content.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise WireError(Code.INVALID_ARGUMENT, "the stream is cut short") from error
            return
        if flags & _COMPRESSED:
            raise WireError(Code.UNIMPLEMENTED, "compressed messages are not supported")
        yield await off_loop(length, _object, data)


class RpcStream:
    """A stream of messages to a client. Raises ConnectionError if the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, message: Mapping[str, Json]) -> None:
        """Send one message. Waits for a slow client, and raises for one that accepts nothing."""
        await self._send(0, message)

    async def end(self, failure: WireError | None = None) -> web.StreamResponse:
        """End the stream, with an error if the call failed."""
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
            raise ConnectionAbortedError("the client accepts no more data") from error

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
            await self._response.prepare(self._request)
        return self._response


def _require_type(request: web.BaseRequest, wanted: str) -> None:
    if request.content_type != wanted:
        message = f"content type {request.content_type!r} is not supported, only {wanted}"
        raise WireError(Code.UNIMPLEMENTED, message, status=415)


def _object(data: bytes) -> dict[str, Json]:
    if len(data) > _MOST_SIGNS and sum(map(data.count, _SIGNS)) > _MOST_SIGNS:
        raise _too_large("a message")
    try:
        value: Json = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise WireError(Code.INVALID_ARGUMENT, f"a message is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(Code.INVALID_ARGUMENT, "a message must be a JSON object")
    return value


def get_text(message: Message, name: str, default: str = "") -> str:
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(name, "a text without NUL characters")
    return value


def get_flag(message: Message, name: str, default: bool = False) -> bool:
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
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
    value = message.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, "a list of texts")
    return _bounded([get_text({name: item}, name) for item in value[: _MOST_TEXTS + 1]], name)


def get_table(message: Message, name: str) -> dict[str, str]:
    """Return an object of strings."""
    table = get_object(message, name)
    values = [get_text(table, key) for key in islice(table, _MOST_TEXTS + 1)]
    return dict(zip(table, _bounded(values, name), strict=True))


def get_object(message: Message, name: str) -> Message:
    """Return an object inside a message; empty if it is absent."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    return value


async def get_bytes(message: Message, name: str) -> bytes:
    """Return bytes, which JSON carries in base64, in either alphabet."""

    given = get_text(message, name)

    def decoded() -> bytes:
        return base64.b64decode(given.replace("-", "+").replace("_", "/") + "==")

    try:
        return await off_loop(len(given), decoded)
    except binascii.Error as error:
        raise _wrong(name, "base64") from error


def _bounded(texts: list[str], name: str) -> list[str]:
    if len(texts) > _MOST_TEXTS or sum(map(len, texts)) > _MOST_BYTES:
        raise _too_large(f"field {name!r}")
    return texts


def _too_large(what: str) -> WireError:
    return WireError(Code.RESOURCE_EXHAUSTED, f"{what} is too large", status=413)


def _wrong(name: str, wanted: str) -> WireError:
    return WireError(Code.INVALID_ARGUMENT, f"field {name!r} must be {wanted}")
