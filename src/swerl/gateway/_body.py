"""Reading a request's body: no larger, slower or more packed than is allowed."""

from __future__ import annotations

import asyncio
import re
import zlib
from io import BytesIO
from typing import Any

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import GatewayError, Refusal

BODY_S = 120.0
"""Seconds for a body to arrive. Agents are near; the largest bodies take a few."""

_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)
"""An escape in JSON's text: a pair of surrogates, one without the other, or any else."""
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""How zlib is told of each packing."""


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytearray:
    """Return a request's body as it comes. Raises GatewayError where it is too large or slow."""
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


def read_object(packed: bytearray, encoding: str, max_bytes: int) -> dict[str, Json]:
    """Return the JSON object in a body that is packed as `encoding` says.

    Raises GatewayError where it is too large, no JSON, or no object.
    """
    body = _unpacked(packed, encoding, max_bytes)
    try:
        value = _read(body)
    except orjson.JSONDecodeError as error:
        raise GatewayError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise GatewayError(f"the request body must be a JSON object, not {type(value).__name__}")
    return value


def _read(body: bytes | bytearray) -> Json:
    """Read JSON; half of a character becomes the sign for what cannot be read.

    Agents cut tool results at a length, and where that is inside an emoji JavaScript writes the
    half that is left as an escape that stands alone. A refusal would end the agent's run.
    """
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        mended = _ESCAPE.sub(_whole, body)
        if mended == body:
            raise
        value = orjson.loads(mended)
    return value


def _whole(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape["half"] else escape[0]


def _unpacked(body: bytearray, encoding: str, max_bytes: int) -> bytes | bytearray:
    """Undo a `Content-Encoding`, and stop where the cap is passed."""
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case ("gzip" | "x-gzip" | "deflate") as name:
            unpacked = _inflated(body, name, max_bytes + 1)
        case "zstd":
            unpacked = _unzstd(body, max_bytes + 1)
        case other:
            raise GatewayError(
                f"the body's encoding {other!r} is not known: send gzip, deflate or zstd"
            )
    if len(unpacked) > max_bytes:
        raise _too_large(max_bytes)
    return unpacked


def _inflated(body: bytearray, name: str, most: int) -> bytes:
    unpacker = zlib.decompressobj(_WBITS[name])
    try:
        unpacked = unpacker.decompress(body, most)
    except zlib.error as error:
        raise _damaged(name) from error
    if len(unpacked) < most and not unpacker.eof:
        raise _damaged(name)
    return unpacked


def _unzstd(body: bytearray, most: int) -> bytes:
    library = _zstandard()
    try:
        with library.ZstdDecompressor(max_window_size=2**27).stream_reader(BytesIO(body)) as reader:
            unpacked: bytes = reader.read(most)
    except library.ZstdError as error:
        raise _damaged("zstd") from error
    return unpacked


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise GatewayError(
            "the body is packed with zstd, which this gateway cannot read: send gzip",
            hint="pip install zstandard",
        ) from error
    return zstandard


def _damaged(name: str) -> GatewayError:
    return GatewayError(f"the request body cannot be read as {name}")


def _too_large(max_bytes: int) -> GatewayError:
    message = f"the request is larger than {max_bytes} bytes"
    return GatewayError(message, refusal=Refusal.TOO_LARGE)
