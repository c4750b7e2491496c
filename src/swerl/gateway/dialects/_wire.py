"""Reading untrusted JSON and writing what every vendor's wire format shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NoReturn, TypeVar

import orjson

from swerl.core.chat import Json, Message, Role
from swerl.core.contracts import WireReply
from swerl.core.errors import GatewayError, Refusal

T = TypeVar("T")

JSON_HEADERS = {"Content-Type": "application/json"}
NO_RETRY = {"x-should-retry": "false"}
"""Vendors' own clients read this header before they retry."""
RETRY_SOON = {"retry-after": "1"}


def refuse(where: str, problem: str) -> NoReturn:
    """Refuse a malformed request, naming the place in it. Raises GatewayError."""
    raise GatewayError(f"{where}: {problem}", refusal=Refusal.INVALID)


def required(body: Mapping[str, Json], key: str, kind: type[T], where: str = "") -> T:
    """Return a field of this JSON type. Raises GatewayError where it is absent or another type."""
    value = body.get(key)
    if type(value) is kind:
        return value
    if key not in body:
        refuse(_path(where, key), "Field required")
    return checked(value, kind, _path(where, key))


def optional(body: Mapping[str, Json], key: str, kind: type[T], where: str = "") -> T | None:
    """Return a field of this JSON type, or None where it is absent or null."""
    value = body.get(key)
    if value is None or type(value) is kind:
        return value
    return checked(value, kind, _path(where, key))


def checked(value: Json, kind: type[T], where: str) -> T:
    """Return the value where it is of this JSON type. Raises GatewayError otherwise."""
    if type(value) is kind:
        return value
    refuse(where, f"Input should be a valid {_NAMES.get(kind, kind.__name__)}")


def max_tokens(body: Mapping[str, Json], *keys: str) -> int | None:
    """Return the first of these fields that is set. Raises GatewayError below 1."""
    for key in keys:
        value = optional(body, key, int)
        if value is not None:
            if value < 1:
                refuse(key, "Input should be greater than or equal to 1")
            return value
    return None


class Unanswered(StrEnum):
    """What a dialect says to a tool call without a result."""

    TAKEN = "taken"
    """Nothing: servers of this dialect differ, and agents live with that."""
    REFUSED = "refused"
    """The result must come, whatever stands between."""
    REFUSED_AT_ONCE = "refused at once"
    """The result must come before the user speaks."""


def check_results(messages: Sequence[Message], unanswered: Unanswered) -> None:
    """Raise GatewayError unless each result has its call, and each call the result it needs.

    Vendors refuse such a conversation too, and two open calls of one id. An id may come again once
    its call is answered: some clients count their calls anew in each turn.
    """
    open_calls: dict[str, None] = {}
    for message in messages:
        if message.role is Role.USER and unanswered is Unanswered.REFUSED_AT_ONCE:
            _refuse_open(open_calls)
        for call in message.tool_calls:
            if call.id in open_calls:
                refuse("messages", f"two open tool calls have the id {call.id!r}")
            open_calls[call.id] = None
        if message.role is Role.TOOL:
            if message.tool_call_id not in open_calls:
                problem = f"tool result {message.tool_call_id!r} answers no open tool call"
                refuse("messages", problem)
            del open_calls[message.tool_call_id]
    if unanswered is not Unanswered.TAKEN:
        _refuse_open(open_calls)


def _refuse_open(calls: Mapping[str, None]) -> None:
    if calls:
        problem = f"each tool call needs its result; none was sent for {', '.join(calls)}"
        refuse("messages", problem)


def call_arguments(written: str) -> dict[str, Json]:
    """Read a call's arguments; OpenAI takes any text, so what is no object is kept whole."""
    try:
        value = orjson.loads(written or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": written}


def shown(value: Json, where: str) -> str:
    """Return JSON as a text for the model. Raises GatewayError where it is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        refuse(where, "Input is nested too deeply")


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the key of an `Authorization: Bearer` header."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def error_reply(status: int, body: Json, headers: Mapping[str, str]) -> WireReply:
    """Build an HTTP answer for a failure."""
    return WireReply(status, {**JSON_HEADERS, **headers}, orjson.dumps(body))


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


_NAMES: Mapping[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    int: "integer",
    bool: "boolean",
}
