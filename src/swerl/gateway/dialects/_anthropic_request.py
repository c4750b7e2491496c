"""Reading the parts of an Anthropic Messages request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from swerl.core.chat import Json, Message, Role, ToolCall
from swerl.gateway.dialects._anthropic_tools import Tools
from swerl.gateway.dialects._wire import checked, optional, refuse, required, shown

_BILLING = "x-anthropic-billing-header"
"""Claude Code's first system block can carry a stamp that changes with each request."""
_JOINT = "\n"
"""Between the text blocks of one message."""
_SHOWN = {"search_result", "server_tool_use", "mcp_tool_use", "mcp_tool_listing"}
"""What the vendor's servers left in a conversation: the model sees it as it is written."""


def read_system(system: Json) -> Iterator[Message]:
    """Yield the system prompt, given as a text or as a list of text blocks."""
    if system is None:
        return
    blocks = [system] if isinstance(system, str) else _texts(system, "system")
    text = _JOINT.join(block for block in blocks if not block.startswith(_BILLING))
    if text:
        yield Message(Role.SYSTEM, text)


def read_messages(items: Sequence[Json], tools: Tools) -> Iterator[Message]:
    """Yield the conversation; each tool result becomes a message of its own.

    Neighbouring assistant messages are one turn, as the vendor's API has it. `tools` learns of
    those that come with a message.
    """
    held: Message | None = None
    for number, item in enumerate(items):
        where = f"messages.{number}"
        fields = checked(item, dict, where)
        match required(fields, "role", str, where):
            case "assistant":
                said = _assistant(fields, where)
                held = _merged(held, said) if held else said
                continue
            case "user":
                messages = _user(fields, where, tools)
            case "system":
                messages = _late_system(fields, where, tools)
            case role:
                refuse(f"{where}.role", f"{role!r} is neither user, assistant nor system")
        if held:
            yield held
            held = None
        yield from messages
    if held:
        yield held


def _late_system(fields: Mapping[str, Json], where: str, tools: Tools) -> Iterator[Message]:
    """Yield what a system message says; one may do no more than change settings."""
    if "content" not in fields and "output_config" in fields:
        return
    content = _content(fields, where)
    if not isinstance(content, str):
        content = _JOINT.join(_texts(content, f"{where}.content", tools))
    if content:
        yield Message(Role.SYSTEM, content)


def _user(fields: Mapping[str, Json], where: str, tools: Tools) -> Iterator[Message]:
    content = _content(fields, where)
    if isinstance(content, str):
        yield Message(Role.USER, content)
        return
    texts: list[str] = []
    for number, item in enumerate(content):
        place = f"{where}.content.{number}"
        block = checked(item, dict, place)
        if required(block, "type", str, place) != "tool_result":
            texts.append(_text(block, place, tools))
            continue
        if texts:
            yield Message(Role.USER, _JOINT.join(texts))
            texts = []
        call_id = required(block, "tool_use_id", str, place)
        yield Message(Role.TOOL, _result_text(block, place, tools), tool_call_id=call_id)
    if texts:
        yield Message(Role.USER, _JOINT.join(texts))


def _assistant(fields: Mapping[str, Json], where: str) -> Message:
    content = _content(fields, where)
    if isinstance(content, str):
        return Message(Role.ASSISTANT, content)
    texts, thoughts, calls = [], [], []
    for number, item in enumerate(content):
        place = f"{where}.content.{number}"
        block = checked(item, dict, place)
        match required(block, "type", str, place):
            case "tool_use":
                calls.append(_call(block, place))
            case "thinking":
                thoughts.append(required(block, "thinking", str, place))
            case "redacted_thinking" | "fallback":
                continue
            case _:
                texts.append(_text(block, place))
    return Message(Role.ASSISTANT, _JOINT.join(texts), _JOINT.join(thoughts), tuple(calls))


def _merged(first: Message, second: Message) -> Message:
    return Message(
        Role.ASSISTANT,
        _JOINT.join(filter(None, (first.text, second.text))),
        _JOINT.join(filter(None, (first.thinking, second.thinking))),
        first.tool_calls + second.tool_calls,
    )


def _call(block: Mapping[str, Json], where: str) -> ToolCall:
    return ToolCall(
        required(block, "id", str, where),
        required(block, "name", str, where),
        required(block, "input", dict, where),
    )


def _result_text(block: Mapping[str, Json], where: str, tools: Tools) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return _JOINT.join(_texts(content, f"{where}.content", tools))


def _content(fields: Mapping[str, Json], where: str) -> str | list[Json]:
    content = fields.get("content")
    if isinstance(content, str | list):
        return content
    refuse(f"{where}.content", "Input should be a valid string or array")


def _texts(blocks: Json, where: str, tools: Tools | None = None) -> list[str]:
    items = checked(blocks, list, where)
    places = [f"{where}.{number}" for number in range(len(items))]
    pairs = zip(items, places, strict=True)
    return [_text(checked(item, dict, place), place, tools) for item, place in pairs]


def _text(block: Mapping[str, Json], where: str, tools: Tools | None = None) -> str:
    """Return a block as text; what is no text is named, for the models here only read."""
    kind = required(block, "type", str, where)
    match kind:
        case "text":
            return required(block, "text", str, where)
        case "tool_reference" if tools:
            return tools.load(required(block, "tool_name", str, where))
        case "tool_addition" | "tool_removal" if tools:
            return tools.change(block, where)
        case "compaction":
            return optional(block, "content", str, where) or ""
        case "image" | "document" | "container_upload":
            return f"[{kind} left out: this model reads text only]"
        case _ if kind in _SHOWN or kind.endswith("_tool_result"):
            return shown(dict(block), where)
        case _:
            refuse(f"{where}.type", f"{kind!r} is not a known content block type")
