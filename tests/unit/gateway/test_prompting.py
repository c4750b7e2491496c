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
        ({}, "5000", "5000"),
        (None, "5000", "5000"),
    ],
)
def test_a_string_argument_is_parsed_as_its_declared_type(
    schema: Json, text: str, value: Json
) -> None:
    tool = Tool("t", parameters={"properties": {"x": schema}})

    assert coerce({"x": text, "other": "1"}, tool) == {"x": value, "other": "1"}


def test_an_unknown_tool_keeps_its_string_arguments() -> None:
    assert coerce({"x": "1"}, None) == {"x": "1"}
    assert coerce({"x": "1"}, Tool("t")) == {"x": "1"}
