"""String arguments become the JSON types that a tool declares."""

from __future__ import annotations

import pytest

from swerl.core.chat import Json, Tool
from swerl.gateway.prompting import coerce


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5000", 5000),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "050", "050"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "array"}, "[" * 250 + "]" * 250, "[" * 250 + "]" * 250),
        ({"type": "array"}, "[" * 2000 + "]" * 2000, "[" * 2000 + "]" * 2000),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "string"}, "5000", "5000"),
        ({"type": ["string", "integer"]}, "5000", "5000"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "80", 80),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "080", "080"),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '["x"]', ["x"]),
        ({"allOf": [{"$ref": "#/$defs/Line"}], "default": 1}, "3", 3),
        ({"$ref": "#/$defs/Where"}, '{"line": 3}', {"line": 3}),
        ({"$ref": "#/$defs/a~1b"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"$ref": "#/$defs/absent"}, "3", "3"),
        ({"$ref": "https://example.com/schema"}, "3", "3"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, 2]}, "true", "true"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["auto", None]}, "null", None),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "5", 5),
        ({"const": 7}, "7", 7),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({}, "5000", "5000"),
        (None, "5000", "5000"),
    ],
)
def test_a_string_argument_is_parsed_as_its_declared_type(
    schema: Json, text: str, value: Json
) -> None:
    definitions: Json = {
        "Line": {"type": "integer"},
        "Where": {"type": "object", "properties": {"line": {"type": "integer"}}},
        "a/b": {"type": "integer"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    }
    tool = Tool("t", parameters={"properties": {"x": schema}, "$defs": definitions})
    assert coerce({"x": text, "other": "1"}, tool) == {"x": value, "other": "1"}


def test_parameters_behind_a_reference_are_declared_too() -> None:
    arguments: Json = {"properties": {"x": {"type": "integer"}}}
    part: Json = {"properties": {"y": {"type": "boolean"}}}
    schema = {"allOf": [{"$ref": "#/definitions/A"}, part], "definitions": {"A": arguments}}
    assert coerce({"x": "1", "y": "true"}, Tool("t", parameters=schema)) == {"x": 1, "y": True}
