"""A reply's calls as the client can use them.

Argument values get the types that the client's tool declares, for families that write all as text.
A call that cannot be read stays in the text, and a call of a tool that nobody offers stands in for
it: a reply without calls would end the agent's work, while every agent answers an unknown tool with
an error that the model reads and can act on.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from swerl.core.chat import ChatRequest, Finish, Json, Tool, ToolCall
from swerl.gateway.speakers import Spoken

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}

UNREADABLE = "malformed_tool_call"
"""Name of the tool whose call stands for one that cannot be read; agents show it to the model."""


def is_unreadable(spoken: Spoken, request: ChatRequest) -> bool:
    """Say whether a whole reply to a client with tools holds a call that cannot be read."""
    is_whole = spoken.completion.finish is not Finish.LENGTH
    return bool(spoken.parsed.malformed_calls and request.tools and is_whole)


def usable_call(
    call_id: str, name: str, arguments: Mapping[str, Json], request: ChatRequest
) -> ToolCall:
    """Return what the model called as the client that asked can use it."""
    tools = (*request.late_tools, *request.tools)
    tool = next((tool for tool in tools if tool.name == name), None)
    is_text = tool is not None and tool.is_text
    return ToolCall(call_id, name, coerce(arguments, tool), is_text)


def coerce(arguments: Mapping[str, Json], tool: Tool | None) -> dict[str, Json]:
    """Return the arguments with each text read as JSON where the tool declares another type.

    A text that does not read as a declared type stays a text: the client explains what is wrong.
    """
    declared = tool.parameters.get("properties") if tool else None
    if not isinstance(declared, dict):
        return dict(arguments)
    return {key: _coerce(value, declared.get(key)) for key, value in arguments.items()}


def _coerce(value: Json, schema: Json) -> Json:
    if not isinstance(value, str) or not isinstance(schema, dict):
        return value
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if "string" in names:
        return value
    try:
        read: Json = orjson.loads(value)
        # Deeper lists can be read than written, and in an answer they stand some levels down.
        orjson.dumps([[[[[[[[read]]]]]]]])
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return value
    return read if any(_is_type(read, name) for name in names) else value


def _is_type(value: Json, name: Json) -> bool:
    expected = _TYPES.get(name) if isinstance(name, str) else None
    if expected is None or (isinstance(value, bool) and name != "boolean"):
        return False
    return isinstance(value, expected)
