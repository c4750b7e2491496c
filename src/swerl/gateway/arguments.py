"""Argument values as the client's tool declares them, for families that write them all as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from swerl.chat import Json, Tool

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def coerce(name: str, arguments: Mapping[str, Json], tools: Sequence[Tool]) -> dict[str, Json]:
    """Return the arguments with each text read as JSON where the tool declares another type.

    A text that does not read as a declared type stays a text: the client explains what is wrong.
    """
    tool = next((tool for tool in tools if tool.name == name), None)
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
    except orjson.JSONDecodeError:
        return value
    return read if any(_is_type(read, name) for name in names) else value


def _is_type(value: Json, name: Json) -> bool:
    expected = _TYPES.get(name) if isinstance(name, str) else None
    if expected is None or (isinstance(value, bool) and name != "boolean"):
        return False
    return isinstance(value, expected)
