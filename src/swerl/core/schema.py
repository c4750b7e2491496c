"""JSON schemas of tools: declared parameters, and the types that a value may have.

Only a value's own type is compared, not its items: the client's error explains those better.
References are read inside one schema and never fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from swerl.core.chat import Json

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_MOST_DEPTH = 32
"""Schemas inside each other in which a value's type is looked for."""


def properties(parameters: Mapping[str, Json]) -> dict[str, Json]:
    """Return the schemas of a tool's parameters by name, those of its references included."""
    return dict(_properties(dict(parameters), parameters, 0))


def accepts(schema: Json, value: Json, parameters: Mapping[str, Json]) -> bool:
    """Return True if a schema of these parameters allows a value of this type, enum or const."""
    return _Types(value, parameters).accept(schema)


def _properties(
    schema: Json, parameters: Mapping[str, Json], depth: int
) -> Iterator[tuple[str, Json]]:
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return
    for key in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _properties(part, parameters, depth + 1)
    if "$ref" in schema:
        yield from _properties(_target(schema["$ref"], parameters), parameters, depth + 1)
    declared = schema.get("properties")
    yield from declared.items() if isinstance(declared, dict) else ()


class _Types:
    """Compares one value with schemas; each reference is followed once, so loops end."""

    def __init__(self, value: Json, parameters: Mapping[str, Json]) -> None:
        self._value = value
        self._parameters = parameters
        self._references: dict[str, bool] = {}

    def accept(self, schema: Json, depth: int = 0) -> bool:
        if not isinstance(schema, dict) or depth > _MOST_DEPTH:
            return schema is not False
        if "const" in schema and not _equal(schema["const"], self._value):
            return False
        options = schema.get("enum")
        if isinstance(options, list) and not any(_equal(o, self._value) for o in options):
            return False
        if self._value is None and schema.get("nullable") is True:
            return True
        if "$ref" in schema and not self._accept_reference(schema["$ref"], depth):
            return False
        for key, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            parts = schema.get(key)
            if isinstance(parts, list) and not combine(self.accept(p, depth + 1) for p in parts):
                return False
        names = schema.get("type")
        listed = names if isinstance(names, list) else [names]
        return names is None or any(_is_type(self._value, name) for name in listed)

    def _accept_reference(self, reference: Json, depth: int) -> bool:
        if not isinstance(reference, str):
            return True
        if reference not in self._references:
            self._references[reference] = False  # what a loop adds to its own union
            target = _target(reference, self._parameters)
            self._references[reference] = self.accept(target, depth + 1)
        return self._references[reference]


def _target(reference: Json, parameters: Mapping[str, Json]) -> Json:
    """Return the schema that a JSON pointer such as `#/$defs/Name` names; True if there is none."""
    target: Json = dict(parameters)
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isascii() and key.isdigit() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            return True
    return target


def _equal(option: Json, value: Json) -> bool:
    return option == value and isinstance(option, bool) == isinstance(value, bool)


def _is_type(value: Json, name: Json) -> bool:
    # A Python bool is an int; a JSON boolean is no number.
    if isinstance(value, bool) or name == "boolean":
        return isinstance(value, bool) and name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    expected = _TYPES.get(name) if isinstance(name, str) else None
    return expected is not None and isinstance(value, expected)
