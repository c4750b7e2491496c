"""The part that all dialects share: reading untrusted JSON, free-text tools, errors.

OpenAI's custom tools take one free text. The model sees each as a tool with one argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NoReturn, TypeVar

import orjson

from swerl.core.chat import Json, Message, Role, Tool, ToolCall, joined
from swerl.core.contracts import WireReply
from swerl.core.errors import (
    EngineError,
    EngineTimeoutError,
    GatewayError,
    InputError,
    Refusal,
    SwerlError,
)

T = TypeVar("T")

_NAMES: Mapping[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    int: "integer",
    bool: "boolean",
}
_TEXT = "input"
_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {_TEXT: {"type": "string"}},
    "required": [_TEXT],
}
_MOST_SIGNS = 1_000_000
"""One of three signs comes with each JSON value, except for an object's and a list's first."""
_NO_RETRY = {"x-should-retry": "false"}
"""Header that the vendors' own clients read before they retry."""
_RETRY_SOON = {"retry-after": "1"}
_STATUSES: Mapping[Refusal, int] = {
    Refusal.INVALID: 400,
    Refusal.AUTHENTICATION: 401,
    Refusal.NOT_FOUND: 404,
    Refusal.TOO_LARGE: 413,
    Refusal.CONTEXT: 400,
    Refusal.LIMIT: 400,
    Refusal.OVERLOADED: 503,
}
_OPENAI_TYPES: Mapping[int, str] = {500: "server_error", 503: "server_error", 504: "server_error"}
_OPENAI_CODES: Mapping[Refusal, str] = {
    Refusal.AUTHENTICATION: "invalid_api_key",
    Refusal.CONTEXT: "context_length_exceeded",
}


def refuse(where: str, problem: str) -> NoReturn:
    """Raise GatewayError: the request is malformed at this place."""
    raise GatewayError(f"{where}: {problem}", refusal=Refusal.INVALID)


def required(body: Mapping[str, Json], key: str, kind: type[T], where: str = "") -> T:
    """Return a field of this JSON type. Raises GatewayError if it is absent or of another type."""
    value = body.get(key)
    if type(value) is kind:
        return value
    if key not in body:
        refuse(_path(where, key), "Field required")
    return checked(value, kind, _path(where, key))


def optional(body: Mapping[str, Json], key: str, kind: type[T], where: str = "") -> T | None:
    """Return a field of this JSON type, or None if it is absent or null."""
    value = body.get(key)
    if value is None or type(value) is kind:
        return value
    return checked(value, kind, _path(where, key))


def checked(value: Json, kind: type[T], where: str) -> T:
    """Return the value if it is of this JSON type. Raises GatewayError otherwise."""
    if type(value) is kind:
        return value
    refuse(where, f"Input should be a valid {_NAMES.get(kind, kind.__name__)}")


def max_tokens(body: Mapping[str, Json], *keys: str) -> int | None:
    """Return the first of these fields that is set. Raises GatewayError below 1."""
    for key in keys:
        value = body.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        value = optional({key: value}, key, int)
        if value is not None:
            if value < 1:
                refuse(key, "Input should be greater than or equal to 1")
            return value
    return None


def stop_texts(body: Mapping[str, Json], key: str) -> tuple[str, ...]:
    """Return the texts before which the client wants the reply to end."""
    value = body.get(key)
    items = [value] if isinstance(value, str) else optional(body, key, list) or []
    texts = [checked(item, str, f"{key}.{number}") for number, item in enumerate(items)]
    return tuple(filter(None, texts))


def turns(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages, with neighbouring ones of the assistant as one."""
    for is_reply, run in groupby(messages, lambda message: message.role is Role.ASSISTANT):
        neighbours = list(run)
        yield from [joined(neighbours)] if is_reply else neighbours


class Unanswered(StrEnum):
    """How a dialect treats a tool call without a result."""

    ACCEPTED = "accepted"
    """No check: servers of this dialect differ, and agents cope."""
    REFUSED = "refused"
    """The result must come, after any other message."""
    REFUSED_AT_ONCE = "refused at once"
    """The result must come before the next user message."""


def in_call_order(messages: Sequence[Message], unanswered: Unanswered) -> tuple[Message, ...]:
    """Return messages with the results of parallel calls in the order of the calls.

    Many templates write no ids, so a model takes the first result for that of its first call.

    Raises GatewayError unless each result has its call, and each call the result it needs. Vendors
    also refuse such a conversation, and two open calls of one id. An id may be used again once its
    call is answered: some clients number their calls from 1 in each turn.
    """
    open_calls: dict[str, int] = {}
    num_calls = 0
    places: list[int] = []
    results: list[tuple[int, Message]] = []
    ordered = list(messages)
    for place, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            _put(ordered, places, results)
        if message.role is Role.USER and unanswered is Unanswered.REFUSED_AT_ONCE:
            _refuse_open(open_calls)
        for call in message.tool_calls:
            if call.id in open_calls:
                refuse("messages", f"two open tool calls have the id {call.id!r}")
            open_calls[call.id] = num_calls = num_calls + 1
        if message.role is Role.TOOL:
            if message.tool_call_id not in open_calls:
                problem = f"tool result {message.tool_call_id!r} answers no open tool call"
                refuse("messages", problem)
            places.append(place)
            results.append((open_calls.pop(message.tool_call_id), message))
    if unanswered is not Unanswered.ACCEPTED:
        _refuse_open(open_calls)
    _put(ordered, places, results)
    return tuple(ordered)


def _put(ordered: list[Message], places: list[int], results: list[tuple[int, Message]]) -> None:
    """Put the results between two replies at their places, in the order of their calls."""
    results.sort(key=lambda result: result[0])
    for place, (_, message) in zip(places, results, strict=True):
        ordered[place] = message
    places.clear()
    results.clear()


def _refuse_open(calls: Mapping[str, int]) -> None:
    if calls:
        problem = f"each tool call needs its result; none was sent for {', '.join(calls)}"
        refuse("messages", problem)


def call_arguments(written: str) -> dict[str, Json]:
    """Read a call's arguments; OpenAI accepts any text, so text that is no object is kept whole.

    So is one of a million values or more: each takes up to 60 bytes, and the bound of a request's
    values does not count those in texts.
    """
    is_bounded = len(written) < _MOST_SIGNS or sum(map(written.count, ",[{")) < _MOST_SIGNS
    try:
        value = orjson.loads(written or "{}") if is_bounded else None
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": written}


def shown(value: Json, where: str) -> str:
    """Return JSON as text for the model. Raises GatewayError if it is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        refuse(where, "Input is nested too deeply")


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the key of an `Authorization: Bearer` header."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def error_reply(status: int, body: Json, headers: Mapping[str, str]) -> WireReply:
    return WireReply(status, {"Content-Type": "application/json", **headers}, orjson.dumps(body))


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def qualified(namespace: str, name: str) -> str:
    """Return a tool's name as the model sees it."""
    return f"{namespace}.{name}" if namespace else name


def read_text_tool(fields: Mapping[str, Json], where: str, namespace: str = "") -> Tool:
    """Read a custom tool; its grammar is not enforced but added to the description."""
    description = optional(fields, "description", str, where) or ""
    form = optional(fields, "format", dict, where) or {}
    if form.get("type") == "grammar":
        nested = f"{where}.format"
        grammar = optional(form, "grammar", dict, nested) or form
        rules = required(grammar, "definition", str, nested)
        syntax = required(grammar, "syntax", str, nested)
        description += f"\n\nThe input follows this {syntax} grammar:\n{rules}"
    name = qualified(namespace, required(fields, "name", str, where))
    return Tool(name, description, _SCHEMA, is_text=True, namespace=namespace)


def text_call(call_id: str, name: str, text: str) -> ToolCall:
    return ToolCall(call_id, name, {_TEXT: text}, is_text=True)


def text_of(call: ToolCall) -> str:
    """Return the text of a custom tool's call; other arguments are returned as JSON."""
    text = call.arguments.get(_TEXT)
    return text if isinstance(text, str) else orjson.dumps(dict(call.arguments)).decode()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the client sees it."""

    status: int
    message: str
    headers: Mapping[str, str]


def failure(error: Exception) -> Failure:
    """Return the client's view of this error; the text of a foreign exception stays hidden."""
    if isinstance(error, GatewayError):
        headers = _RETRY_SOON if error.refusal is Refusal.OVERLOADED else _NO_RETRY
        return Failure(_STATUSES[error.refusal], str(error), headers)
    if isinstance(error, InputError):
        return Failure(400, str(error), _NO_RETRY)
    if isinstance(error, EngineTimeoutError):
        return Failure(504, str(error), _NO_RETRY)
    if isinstance(error, EngineError):
        headers = _RETRY_SOON if error.retryable else _NO_RETRY
        return Failure(503 if error.retryable else 500, f"the engine failed: {error}", headers)
    if isinstance(error, SwerlError):
        return Failure(500, str(error), _NO_RETRY)
    return Failure(500, f"internal error: {type(error).__name__}", _NO_RETRY)


def openai_error(error: Exception, failed: Failure) -> Json:
    """Build the body of an error in OpenAI's format."""
    refusal = error.refusal if isinstance(error, GatewayError) else None
    detail: Json = {
        "message": failed.message,
        "type": _OPENAI_TYPES.get(failed.status, "invalid_request_error"),
        "param": None,
        "code": _OPENAI_CODES.get(refusal) if refusal else None,
    }
    return {"error": detail}
