"""OpenAI's custom tools: a call brings one free text. The model sees a tool with one argument."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from swerl.core.chat import Json, Tool, ToolCall
from swerl.gateway.dialects._wire import optional, required

_INPUT = "input"
_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
}


def read_text_tool(fields: Mapping[str, Json], where: str, namespace: str = "") -> Tool:
    """Read a custom tool; its grammar, which nothing enforces here, is told to the model."""
    description = optional(fields, "description", str, where) or ""
    form = optional(fields, "format", dict, where) or {}
    if form.get("type") == "grammar":
        nested = f"{where}.format"
        grammar = optional(form, "grammar", dict, nested) or form
        rules = required(grammar, "definition", str, nested)
        syntax = required(grammar, "syntax", str, nested)
        description += f"\n\nThe input follows this {syntax} grammar:\n{rules}"
    name = namespace + required(fields, "name", str, where)
    return Tool(name, description, _SCHEMA, is_text=True)


def text_call(call_id: str, name: str, text: str) -> ToolCall:
    """Return a call of a custom tool."""
    return ToolCall(call_id, name, {_INPUT: text}, is_text=True)


def text_of(call: ToolCall) -> str:
    """Return what a call says; arguments that the tool does not know are sent as they are."""
    text = call.arguments.get(_INPUT)
    return text if isinstance(text, str) else orjson.dumps(dict(call.arguments)).decode()
