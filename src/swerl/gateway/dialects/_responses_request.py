"""Reading the items of an OpenAI Responses request.

Tools of a namespace, which stand in a list of their own, are called `namespace.tool`: a plain
tool's name has no dot, so the reply can be taken apart again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from swerl.core.chat import Json, Message, Role, Tool, ToolCall
from swerl.gateway.dialects._free_text import read_text_tool, text_call
from swerl.gateway.dialects._wire import call_arguments, checked, optional, refuse, required, shown

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_SETTINGS = {"additional_tools", "mcp_list_tools", "configuration_update"}
_TEXT_PARTS = {"input_text", "output_text", "reasoning_text", "summary_text", "text"}
_OTHER_PARTS = {"input_image", "input_file", "input_audio", "computer_screenshot"}


def read_input(value: Json) -> Iterator[Message]:
    """Yield the conversation; neighbouring items of the assistant are one message."""
    if isinstance(value, str):
        yield Message(Role.USER, value)
        return
    held: Message | None = None
    for number, item in enumerate(checked(value, list, "input")):
        message = _message(item, f"input.{number}")
        if message.role is Role.ASSISTANT:
            held = _merged(held, message) if held else message
            continue
        if held:
            yield held
            held = None
        yield message
    if held:
        yield held


def read_tools(items: Sequence[Json], namespace: str = "") -> Iterator[Tool]:
    """Yield the functions on offer; the vendor's own tools, which run at its side, are left out."""
    for number, item in enumerate(items):
        where = f"tools.{number}"
        fields = checked(item, dict, where)
        kind = required(fields, "type", str, where)
        if kind == "namespace" and not namespace:
            inner = required(fields, "tools", list, where)
            yield from read_tools(inner, required(fields, "name", str, where) + ".")
        elif kind == "custom":
            yield read_text_tool(fields, where, namespace)
        elif kind == "function":
            yield Tool(
                namespace + required(fields, "name", str, where),
                optional(fields, "description", str, where) or "",
                optional(fields, "parameters", dict, where) or {},
            )


def _message(item: Json, where: str) -> Message:
    fields = checked(item, dict, where)
    match optional(fields, "type", str, where) or "message":
        case "message":
            name = required(fields, "role", str, where)
            if name not in _ROLES:
                refuse(f"{where}.role", f"{name!r} is not a known role")
            return Message(_ROLES[name], _text(fields.get("content"), f"{where}.content"))
        case "reasoning":
            return Message(Role.ASSISTANT, thinking=_thinking(fields, where))
        case "function_call" | "custom_tool_call":
            return Message(Role.ASSISTANT, tool_calls=(_call(fields, where),))
        case "function_call_output" | "custom_tool_call_output":
            call_id = required(fields, "call_id", str, where)
            output = _text(fields.get("output"), f"{where}.output")
            return Message(Role.TOOL, output, tool_call_id=call_id)
        case "item_reference":
            refuse(where, "nothing is stored here: send the item itself")
        case "compaction_trigger":
            refuse(where, "nothing is compacted here: ask the model for a summary")
        case kind:
            # what the vendor's own tools leave in a conversation is shown to the model as it is
            return Message(_speaker(kind), shown({**fields, "type": kind}, where))


def _speaker(kind: str) -> Role:
    """Return who says an item that is no message."""
    if kind in _SETTINGS:
        return Role.SYSTEM
    return Role.USER if kind.endswith(("_output", "_response")) else Role.ASSISTANT


def _call(fields: Mapping[str, Json], where: str) -> ToolCall:
    namespace = optional(fields, "namespace", str, where)
    name = required(fields, "name", str, where)
    full = f"{namespace}.{name}" if namespace else name
    call_id = required(fields, "call_id", str, where)
    if fields["type"] == "custom_tool_call":
        return text_call(call_id, full, required(fields, "input", str, where))
    return ToolCall(call_id, full, call_arguments(required(fields, "arguments", str, where)))


def _thinking(fields: Mapping[str, Json], where: str) -> str:
    parts = [*(optional(fields, "content", list, where) or [])]
    parts = parts or [*(optional(fields, "summary", list, where) or [])]
    return _text(parts, f"{where}.content")


def _text(content: Json, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = checked(content, list, where)
    return "\n".join(_part(part, f"{where}.{number}") for number, part in enumerate(parts))


def _part(item: Json, where: str) -> str:
    """Return a content part as text; what is no text is named, for the models here only read."""
    fields = checked(item, dict, where)
    kind = required(fields, "type", str, where)
    if kind in _TEXT_PARTS:
        return required(fields, "text", str, where)
    if kind == "refusal":
        return required(fields, "refusal", str, where)
    if kind in _OTHER_PARTS:
        return f"[{kind} left out: this model reads text only]"
    refuse(f"{where}.type", f"{kind!r} is not a known content part type")


def _merged(first: Message, second: Message) -> Message:
    return replace(
        first,
        text="\n".join(filter(None, (first.text, second.text))),
        thinking="\n".join(filter(None, (first.thinking, second.thinking))),
        tool_calls=first.tool_calls + second.tool_calls,
    )
