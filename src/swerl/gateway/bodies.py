"""Request bodies: read, unpack and parse untrusted JSON, within bounds of memory and CPU."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import GatewayError, Refusal
from swerl.gateway.limits import LONG_BYTES, MOST_VALUES

BODY_S = 120.0
"""Seconds for a body to arrive. Agents are near; the largest bodies take a few."""
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)
"""An escape in JSON text: a pair of surrogates, a lone surrogate, or any other."""
_CONTAINERS = frozenset({dict, list})
_SIGNS = (b",", b"[", b"{")
"""One of them comes with each JSON value, except for an object's and a list's first."""
_MOST_SIGNS = 8 * MOST_VALUES
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's `wbits` for each content encoding."""


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
                    raise _too_many_bytes(max_bytes)
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
    # Texts have such signs too, so only a multiple of the bound is certainly too much: 30 MiB of
    # empty lists would take 700 MiB.
    if len(plain) > LONG_BYTES and sum(map(plain.count, _SIGNS)) > _MOST_SIGNS:
        raise too_large(f"more than {MOST_VALUES} JSON values")
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
        raise _too_many_bytes(max_bytes)
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


def count_values(body: Mapping[str, Json]) -> int:
    """Count the JSON values in a body. Raises GatewayError above MOST_VALUES."""
    num, unread = 0, list[Any]([body])
    while unread:
        part = unread.pop()
        held = part.values() if isinstance(part, dict) else part
        num += len(held)
        if num > MOST_VALUES:
            raise too_large(f"more than {MOST_VALUES} JSON values")
        unread += [value for value in held if type(value) in _CONTAINERS]
    return num


def num_items(body: Mapping[str, Json]) -> int:
    """Return the number of messages, or of Responses items."""
    lists = (body.get("messages"), body.get("input"))
    return sum(len(items) for items in lists if isinstance(items, list))


def _too_many_bytes(max_bytes: int) -> GatewayError:
    return too_large(f"larger than {max_bytes} bytes")


def too_large(problem: str) -> GatewayError:
    """Return the refusal of a request that exceeds a bound."""
    return GatewayError(f"the request is too large: {problem}", refusal=Refusal.TOO_LARGE)
