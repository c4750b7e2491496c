"""Request bodies: read, unpack and parse untrusted JSON, within bounds of memory and CPU.

An agent sends its whole history with every request, so a body begins as an earlier one did.
`Replays` parses only the rest of it.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import takewhile
from secrets import token_hex
from typing import Any

import orjson
from aiohttp import web

from swerl.core.chat import ChatRequest, Json, Message, Role
from swerl.core.contracts import Dialect
from swerl.core.errors import GatewayError, Refusal, install_command
from swerl.gateway.limits import LONG_BYTES, LONG_MESSAGES, LONG_VALUES, MOST_VALUES

BODY_S = 120.0
"""Seconds for a body to arrive. Agents are near; the largest bodies take a few."""
_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+"
    rb"(?:\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][\da-fA-F]{2}))"
)
"""In JSON text, after escaped backslashes: an escaped pair of surrogates, or a lone half."""
_CONTAINERS = frozenset({dict, list})
_SIGNS = (b",", b"[", b"{")
"""One of them comes with each JSON value, except for an object's and a list's first."""
_MOST_SIGNS = 8 * MOST_VALUES
_LONG_SIGNS = 5 * LONG_VALUES
"""Signs from which a body is read in a thread; code has one in thirty bytes."""
_LISTS = ("messages", "input")
"""Names of the field with the conversation's items."""
_RESULTS = ("_output", "_response")
"""Ends of the types of items without a role that are not part of a reply."""
_REST = "\0"
"""Name of the list of items in the rest of a body."""
_MOST_HEADS = 4
"""Heads of one Session: its agent's, and those of sub-agents at work."""
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


def may_be_large(body: bytearray) -> bool:
    """Return True if reading a body could block the event loop: by its bytes or its values.

    Calls may have their arguments as text, whose values count, too.
    """
    return len(body) > LONG_BYTES or sum(map(body.count, _SIGNS)) > _LONG_SIGNS


def read_plain(body: bytearray) -> dict[str, Json] | None:
    """Return the JSON object in a body; None if only `read_object` can read or refuse it."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def read_object(body: bytearray, encoding: str, max_bytes: int) -> dict[str, Json]:
    """Return the JSON object in a body with this `Content-Encoding`.

    Raises GatewayError if it is too large, has too many values, is no JSON, or no object.
    """
    content = _decompressed(body, encoding, max_bytes)
    # Texts have such signs too, so only a multiple of the bound is certainly too much: 30 MiB of
    # empty lists would take 700 MiB.
    if len(content) > LONG_BYTES and sum(map(content.count, _SIGNS)) > _MOST_SIGNS:
        raise too_large(f"more than {MOST_VALUES} JSON values")
    try:
        value = _parsed(content)
    except orjson.JSONDecodeError as error:
        raise GatewayError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise GatewayError(f"the request body must be a JSON object, not {type(value).__name__}")
    if count_values(value, most=MOST_VALUES) > MOST_VALUES:
        raise too_large(f"more than {MOST_VALUES} JSON values")
    return value


def _parsed(body: bytes | bytearray) -> Json:
    """Parse JSON; a lone surrogate becomes the replacement character.

    Agents cut tool results at a length. A cut inside an emoji leaves half of a surrogate pair,
    which JavaScript writes as a lone escape. A refusal would end the agent's run.
    """
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        fixed = _without_halves(body)
        if fixed == body:
            raise
        value = orjson.loads(fixed)
    return value


def _without_halves(body: bytes | bytearray) -> bytearray:
    """Replace lone surrogates; the result is the only copy of the body."""
    fixed, end = bytearray(), 0
    view = memoryview(body)
    for match in _SURROGATE.finditer(body):
        if match["half"]:
            fixed += view[end : match.start("half")]
            fixed += rb"\ufffd"
            end = match.end()
    return fixed + view[end:]


def _decompressed(body: bytearray, encoding: str, max_bytes: int) -> bytes | bytearray:
    """Undo a `Content-Encoding`; stop at the cap, so that a small body cannot fill the memory."""
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case ("gzip" | "x-gzip" | "deflate") as name:
            content = _inflated(body, name, max_bytes + 1)
        case "zstd":
            content = _unzstd(body, max_bytes + 1)
        case other:
            raise GatewayError(
                f"the body's encoding {other!r} is not known: send gzip, deflate or zstd"
            )
    if len(content) > max_bytes:
        raise _too_many_bytes(max_bytes)
    return content


def _inflated(body: bytearray, name: str, most: int) -> bytes:
    decompressor = zlib.decompressobj(_WBITS[name])
    try:
        content = decompressor.decompress(body, most)
    except zlib.error as error:
        raise GatewayError(f"the request body cannot be read as {name}") from error
    if len(content) < most and not decompressor.eof:
        raise GatewayError(f"the request body cannot be read as {name}")
    return content


def _unzstd(body: bytearray, most: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise GatewayError(
            "the body is packed with zstd, which this gateway cannot read: send gzip",
            hint=install_command("zstd"),
        ) from error
    library: Any = zstandard
    try:
        with library.ZstdDecompressor(max_window_size=2**27).stream_reader(BytesIO(body)) as reader:
            content: bytes = reader.read(most)
    except library.ZstdError as error:
        raise GatewayError("the request body cannot be read as zstd") from error
    return content


def count_values(body: Mapping[str, Json], *, most: int) -> int:
    """Count the JSON values in a body; counting ends above `most`."""
    num, unread = 0, list[Any]([body])
    while unread:
        part = unread.pop()
        values = part.values() if isinstance(part, dict) else part
        num += len(values)
        if num > most:
            break
        unread += [value for value in values if type(value) in _CONTAINERS]
    return num


def num_items(body: Mapping[str, Json]) -> int:
    """Return the number of messages, or of Responses items."""
    lists = (body.get("messages"), body.get("input"))
    return sum(len(items) for items in lists if isinstance(items, list))


@dataclass(frozen=True, slots=True)
class _Head:
    """The beginning of a body, up to the last reply: clients move cache markers after that."""

    raw: memoryview
    """Up to the first byte of the next item."""
    key: str
    fields: Mapping[str, Json]
    """The fields before the items."""
    tools: Json
    leading: tuple[Message, ...]
    """Messages made of other fields, such as the system prompt."""
    messages: tuple[Message, ...]
    num_values: int = 0


class Replays:
    """The heads of one Session's latest bodies, of which each is the beginning of the next."""

    def __init__(self) -> None:
        self._heads: list[_Head] = []
        """The latest first."""
        self._mark: Json = {"role": "user", "content": token_hex(16)}
        """Put between the parts of a conversation while a dialect parses it."""

    def read(self, dialect: Dialect, raw: bytearray) -> ChatRequest | None:
        """Return what parsing the whole body returns; None if it has to be parsed whole."""
        heads = (head for head in self._heads if raw.startswith(head.raw))
        head = max(heads, key=lambda head: len(head.raw), default=None)
        if head is None:
            return None
        try:
            rest = orjson.loads(b'{"\\u0000":[' + memoryview(raw)[len(head.raw) :])
        except orjson.JSONDecodeError:
            return None
        items = rest.pop(_REST, None)
        # A second list of items would replace the first, and other tools may change its meaning.
        body = {**head.fields, head.key: items, **rest}
        if head.key in rest or body.get("tools") != head.tools:
            return None
        return self._parse(dialect, body, head, raw)

    def keep(
        self, dialect: Dialect, body: Mapping[str, Json], raw: bytearray
    ) -> ChatRequest | None:
        """Parse a whole body and keep its head; return None if it has none."""
        key = next((key for key in _LISTS if isinstance(body.get(key), list)), "")
        if not key:
            return None
        fields = {name: body[name] for name in takewhile(lambda name: name != key, body)}
        head = _Head(memoryview(b""), key, fields, body.get("tools"), (), ())
        return self._parse(dialect, body, head, raw)

    def _parse(
        self, dialect: Dialect, body: Mapping[str, Json], head: _Head, raw: bytearray
    ) -> ChatRequest | None:
        """Parse the items after a head; an empty one is that of any body."""
        items: Any = body[head.key]
        place = _last_reply(items)
        num = count_values(body, most=LONG_VALUES)
        if place is None or num > LONG_VALUES or num_items(body) > LONG_MESSAGES:
            return None
        if head.num_values + num > MOST_VALUES:
            return None
        marked = [self._mark, *items[:place], self._mark, *items[place:]]
        try:
            request = dialect.parse({**body, head.key: marked})
        except GatewayError:  # parsing the whole body names the place of the error
            return None
        leading, new, last = self._split(request.messages)
        # Replies without another message between them are one message, so no mark may part them.
        if not last or last[0].role is not Role.ASSISTANT or request.late_tools:
            return None
        if new and new[-1].role is Role.ASSISTANT:
            return None
        # Nor may the head's end, and its messages follow the same system prompt.
        if head.raw and ((new or last)[0].role is not Role.ASSISTANT or leading != head.leading):
            return None
        grown = replace(
            head,
            leading=leading,
            messages=head.messages + new,
            num_values=head.num_values + count_values({"": items[:place]}, most=LONG_VALUES),
        )
        if _is_answered(new) and (end := _start_of(items[place:], body, grown, raw)):
            others = [other for other in self._heads if other is not head]
            self._heads = [replace(grown, raw=memoryview(raw)[:end]), *others][:_MOST_HEADS]
        return replace(request, messages=leading + grown.messages + last)

    def _split(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
        """Return the messages before, between and after the marks; none without both marks."""
        parts: list[list[Message]] = [[]]
        for message in messages:
            if message.text == self._mark["content"]:  # type: ignore[index,call-overload]
                parts.append([])
            else:
                parts[-1].append(message)
        return tuple(map(tuple, parts)) if len(parts) == 3 else ((), (), ())


def _start_of(last: list[Json], body: Mapping[str, Json], head: _Head, raw: bytearray) -> int:
    """Return the place in a body of its last items; 0 if a client writes JSON in another way."""
    try:
        written = orjson.dumps(last)[1:-1]
        start = raw.rfind(written, len(head.raw))
        end = raw[start + len(written) :]
        if start <= 0 or not end.startswith(b"]"):
            return 0
        fields = orjson.loads(b'{"":0' + end[1:])
    except (orjson.JSONEncodeError, orjson.JSONDecodeError):
        return 0
    # Only the list of items has so many fields after it.
    return start if len(fields) == len(body) - len(head.fields) else 0


def _last_reply(items: Sequence[Any]) -> int | None:
    """Return the number of the first item of the last reply."""
    end = next((n for n in range(len(items), 0, -1) if _is_reply(items[n - 1])), None)
    if end is None:
        return None
    return next((n for n in range(end - 1, 0, -1) if not _is_reply(items[n - 1])), 0)


def _is_reply(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    if "role" in item:
        return bool(item["role"] == "assistant")
    return not str(item.get("type", "")).endswith(_RESULTS)


def _is_answered(messages: Sequence[Message]) -> bool:
    """Return True if each call has its result: no later message can change their meaning."""
    results = {message.tool_call_id for message in messages}
    return all(call.id in results for message in messages for call in message.tool_calls)


def _too_many_bytes(max_bytes: int) -> GatewayError:
    return too_large(f"larger than {max_bytes} bytes")


def too_large(problem: str) -> GatewayError:
    """Return the refusal of a request that exceeds a bound."""
    return GatewayError(f"the request is too large: {problem}", refusal=Refusal.TOO_LARGE)
